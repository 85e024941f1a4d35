"""`python -m benchmarks learning`: the command line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.bench.flags import JsonFile, Model, Quantization, Threads
from paceline.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from benchmarks.learning.shift import Shift, Window

MIN_GAIN, MAX_LOSS = 1.25, 0.98  # the bars: on the new domain, and on the old traffic


def learning_command(
    model: Model = DEFAULT_MODEL,
    domain: Annotated[str, typer.Option(help="What the traffic shifts to: tools or sql.")] = "tools",
    window: Annotated[int, typer.Option(help="Requests that are measured together.")] = 24,
    before: Annotated[int, typer.Option(help="Windows of chat, before the shift.")] = 4,
    shifted: Annotated[int, typer.Option(help="Windows of the new domain.")] = 10,
    after: Annotated[int, typer.Option(help="Windows of chat, after the second shift.")] = 4,
    train_rows: Annotated[int, typer.Option(help="New rows that start a training.")] = 120,
    minutes: Annotated[float, typer.Option(help="Minutes of each training.")] = 5.0,
    steps: Annotated[int | None, typer.Option(help="Steps of each training, instead of minutes.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: of both engines and the trainer.")] = "auto",
    threads: Threads = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of traffic and heads. Default: deleted at the end.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="File to draw tokens per pass over time to.")] = None,
    json_file: JsonFile = None,
) -> None:
    """What does a head gain that learns the traffic, when the traffic shifts to a new domain and back?"""
    from benchmarks.learning.shift import OLD_DOMAIN, ShiftOptions, run_shift

    options = ShiftOptions(
        model,
        domain,
        window,
        before,
        shifted,
        after,
        train_rows,
        minutes,
        steps,
        threads=threads,
        device=device,
    )
    with TemporaryDirectory() as temporary:
        shift = run_shift(options, folder or Path(temporary), _show)
    gain, kept = shift.gain(domain), shift.gain(OLD_DOMAIN, last=after or before)
    same = all(each.same for each in shift.windows)
    typer.echo(
        f"{domain}, last windows: {gain:.3f} of the static head (bar {MIN_GAIN}); {OLD_DOMAIN} after it: "
        f"{kept:.3f} (bar {MAX_LOSS}); {shift.seconds:.0f} s; answers {'equal' if same else 'NOT EQUAL'}"
    )
    if json_file is not None:
        json_file.write_text(json.dumps(shift.facts(), indent=1) + "\n")
    if svg is not None:
        svg.write_text(picture_of(shift))
    raise typer.Exit(0 if same else 1)


def learning_unattended_command(
    model: Model = DEFAULT_MODEL,
    domain: Annotated[str, typer.Option(help="What the traffic shifts to: tools or sql.")] = "tools",
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 3.0,
    chats: Annotated[int, typer.Option(help="Chats before the shift.")] = 60,
    held_out: Annotated[
        int, typer.Option(help="Prompts of each kind that both servers get at the end.")
    ] = 60,
    limit: Annotated[float, typer.Option(help="Seconds until the swap, at most.")] = 600.0,
    min_rows: Annotated[int, typer.Option(help="New rows before a training.")] = 200,
    minutes: Annotated[float, typer.Option(help="Minutes of a training, at most.")] = 20.0,
    gpu_share: Annotated[float, typer.Option(help="--learn-gpu-share of the server that learns.")] = 0.1,
    draft: Annotated[str, typer.Option(help="--draft of both servers.")] = "eagle3",
    device: Annotated[str, typer.Option(help="cpu or cuda: of both servers and the trainer.")] = "cpu",
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """How long until a server that learns swaps a head in by itself, and what does it gain?"""
    from benchmarks.learning.shift import OLD_DOMAIN
    from benchmarks.learning.unattended import UnattendedOptions, run_unattended
    from benchmarks.server.process import serve_flags

    began = time.monotonic()

    def say(line: str) -> None:
        typer.echo(f"{time.monotonic() - began:5.0f} s  {line}")

    options = UnattendedOptions(model, domain, rate, chats, held_out, limit)
    flags = serve_flags(threads, quantization, ("--draft", draft))
    given = {"min-rows": min_rows, "minutes": minutes, "gpu-share": gpu_share}
    learn = [part for name, value in given.items() for part in (f"--learn-{name}", str(value))]
    with TemporaryDirectory() as folder:
        result = run_unattended(options, Path(folder), flags, learn, device, say)
    for decision in result.state["decisions"]:
        say(str(decision))
    if json_file is not None:
        json_file.write_text(json.dumps(result.facts(), indent=1) + "\n")
    if result.swapped_after is None:
        say(f"no head was swapped in within {limit:.0f} s")
        raise typer.Exit(1)
    ratios = {kind: result.ratio(kind) for kind in (domain, OLD_DOMAIN)}
    say(
        f"{domain}: {ratios[domain]:.3f} of the static head (bar {MIN_GAIN}); {OLD_DOMAIN}: "
        f"{ratios[OLD_DOMAIN]:.3f} (bar {MAX_LOSS}); answers {'equal' if result.same else 'NOT EQUAL'}"
    )
    raise typer.Exit(0 if result.same else 1)


def learning_load_command(
    model: Model = DEFAULT_MODEL,
    clients: Annotated[str, typer.Option(help="Numbers of concurrent clients.")] = "1,16",
    rounds: Annotated[
        str, typer.Option(help="Turns of each server; may differ for each of --clients, as in 8,5.")
    ] = "5",
    requests: Annotated[
        str,
        typer.Option(help="Requests in a turn, at least two per client; may differ for each of --clients."),
    ] = "8",
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 48,
    train_rows: Annotated[
        int, typer.Option(help="Requests before the training, which passes over them three times.")
    ] = 96,
    draft: Annotated[
        str,
        typer.Option(
            help="--draft of all servers. With eagle3 no controllers decide, and servers differ less."
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda: of both servers and the trainer.")] = "cpu",
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Is a server slower while it learns? With --learn, its trainer at work, beside one without, in turns."""
    from benchmarks.learning.load import Load, measure_learning_load
    from benchmarks.learning.load_report import learning_load_result
    from benchmarks.server.process import serve_flags
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress

    report = Report(json_file)
    loads = [Load(*numbers) for numbers in _each_of(clients, requests, rounds)]
    flags = serve_flags(threads, quantization, ("--draft", draft))
    turns = sum(3 * (1 + load.rounds) for load in loads)
    with TemporaryDirectory() as folder, progress(turns) as on_turn:
        compared = []
        where = Path(folder), flags, device, on_turn
        for each in measure_learning_load(model, loads, tokens, *where, train_rows):
            compared.append(each)
            typer.echo(each.summary)  # the others take minutes
    facts = {"model": model, "rounds": rounds, "requests": requests, "tokens": tokens, "threads": threads}
    facts |= {"device": device, "draft": draft, "train_rows": train_rows}
    report.show(learning_load_result(compared, facts))


def _each_of(first: str, *others: str) -> list[tuple[int, ...]]:
    """The numbers of these lists, one of each together; a list of one number holds for all of the first."""
    lists = [[int(number) for number in given.split(",")] for given in (first, *others)]
    size = len(lists[0])
    if any(len(each) not in (1, size) for each in lists):
        raise typer.BadParameter(f"give one number, or one for each of --clients, which has {size}.")
    return list(zip(*(each * size if len(each) == 1 else each for each in lists), strict=True))


def _show(window: Window) -> None:
    reason = window.verdict.get("reason", "")
    typer.echo(
        f"{window.seconds:5.0f} s  {window.requests:5} requests  {window.domain:6} "
        f"static {window.static:.3f}  learning {window.learning:.3f}  "
        f"{'SWAPPED: ' if window.swapped else ''}{reason}"
    )


def picture_of(shift: Shift) -> str:
    """Tokens per pass of both heads over the requests, with the swaps."""
    from paceline.train.report.plot import COLOURS, GREY, Curve, picture

    windows = shift.windows
    curves = [
        Curve("static", [(each.requests, each.static) for each in windows], COLOURS[1]),
        Curve("learning", [(each.requests, each.learning) for each in windows], COLOURS[0]),
    ]
    values = [value for each in windows for value in (each.static, each.learning)]
    swaps = [each.requests for each in windows if each.swapped]
    for number, requests in enumerate(swaps):
        ends = [(requests, min(values)), (requests, max(values))]
        curves.append(Curve("" if number else "swap", ends, GREY, dashed=True))
    options = shift.options
    first = options.before * options.window
    second = first + options.shifted * options.window
    title = f"tokens per pass: chat, from request {first} {options.domain}, from {second} chat again"
    return picture([(title, curves)], "requests, each a prompt that was never sent before")
