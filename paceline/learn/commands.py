"""`paceline learn status|show|train|export|clear`; head_commands.py has score, promote and rollback."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError
from paceline.learn.data.folder import NOTHING_BETTER, LearnFolder
from paceline.learn.data.rows import Damage, TrafficRow
from paceline.learn.data.split import side_of
from paceline.learn.data.store import StoreCount, TrafficStore
from paceline.learn.evaluation.history import History
from paceline.learn.head_commands import (
    CURRENT,
    STOPPED,
    BusyShare,
    GpuShare,
    HeadFolder,
    Salt,
    ServerActivity,
    add_head_commands,
    present_head,
    present_trained,
)
from paceline.terminal.help import App
from paceline.terminal.session import note
from paceline.words import counted

app = App(help="Learn from the traffic that a server with --learn has kept.", no_args_is_help=True)
add_head_commands(app)

SHOWN_DECISIONS = 10

Model = Annotated[str, typer.Argument(help="The target: an alias, a .gguf file, a folder or a hub id.")]
Folder = Annotated[Path, typer.Option("--dir", help="The folder of --learn-dir.")]
From = Annotated[Path, typer.Option("--from", help="The folder of --learn-dir.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("status")
def status_command(folder: Folder, salt: Salt = "", as_json: AsJson = False) -> None:
    """Say what the folder holds: rows, the candidate if there is one, the head that serves, decisions."""
    from paceline.learn.training.fine_tune import read_candidate

    learned, store = LearnFolder(folder, salt), TrafficStore(_store(folder))
    count, candidate, history = (
        store.count(),
        read_candidate(learned.candidate),
        History(learned.heads, folder),
    )
    if as_json:
        facts = {
            "target": asdict(store.target),
            "traffic": asdict(count),
            "salts": learned.salts(),
            "candidate": None if candidate is None else asdict(candidate),
            "head": history.current().number,
            "live": history.live(),
            "decisions": history.decisions(),
        }
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo(f"target     {store.target.name} ({store.target.fingerprint})")
    for line in _lines(count):
        typer.echo(line)
    if salts := learned.salts():
        typer.echo(f"salts      {', '.join(salts)}: have heads of their own, see --salt")
    if candidate is not None:
        gains = ", ".join(
            f"{name} rows {before:.2f} to {candidate.after[name]:.2f}"
            for name, before in candidate.before.items()
        )
        typer.echo(
            f"candidate  {candidate.method}, {counted(candidate.steps, 'steps')}; tokens per pass: {gains}"
        )
    for line in _head_lines(history):
        typer.echo(line)


@app.command("show")
def show_command(
    folder: Folder,
    last: Annotated[int, typer.Option(help="Number of rows, the newest.")] = 10,
    text: Annotated[
        str | None, typer.Option(help="Model whose tokenizer spells the ids; they are shown as text.")
    ] = None,
) -> None:
    """Print the newest rows that were kept, one JSON object per line."""
    from collections import deque

    from paceline.models.registry import load_tokenizer, resolve

    tokenizer = None if text is None else load_tokenizer(resolve(text))
    for row in deque(TrafficStore(_store(folder)).rows(), maxlen=last):
        facts = {**asdict(row), "side": side_of(row.prompt_ids).value}
        if tokenizer is not None:
            facts["prompt"] = tokenizer.decode(list(facts.pop("prompt_ids")), skip_special_tokens=False)
            facts["output"] = tokenizer.decode(list(facts.pop("output_ids")), skip_special_tokens=False)
        typer.echo(json.dumps(facts, ensure_ascii=False))


@app.command("train")
def train_command(
    source: From,
    out: Annotated[Path, typer.Option(help="Folder of the candidate.")],
    model: Model = DEFAULT_MODEL,
    head: HeadFolder = CURRENT,
    minutes: Annotated[float | None, typer.Option(help="Minutes of work; waiting does not count.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps, instead of minutes.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="Rows from this time on are new, the others are replayed: 2026-11-17T09:30. Default: from "
            "the training of the head that was promoted in --from; 0: all are new."
        ),
    ] = None,
    replay: Annotated[float, typer.Option(help="Share of old rows among those trained on.")] = 0.4,
    generic: Annotated[
        list[Path] | None,
        typer.Option(help="File of `paceline train answers` that counts as old rows. May be repeated."),
    ] = None,
    salt: Annotated[
        str, typer.Option(help="Rows of this salt (its hash), or all. Default: rows without a salt.")
    ] = "",
    learning_rate: Annotated[float, typer.Option(help="Maximum learning rate, after the warm-up.")] = 1e-4,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per step. Default: 2,048 on a GPU, on a CPU by the speed of a first step."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda if available.")] = "auto",
    gpu_share: GpuShare = 0.1,
    busy_share: BusyShare = None,
    activity: ServerActivity = None,
    threads: Annotated[int, typer.Option(help="Number of CPU cores to use.")] = 1,
    nice: Annotated[int, typer.Option(help="Priority: 19 gives way to everything, 0 is the usual one.")] = 19,
    end_with_parent: Annotated[
        bool, typer.Option("--end-with-parent", help="End when the process that started this one ends.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a head further on kept traffic, and write it if it drafts better on rows that were held back."""
    from paceline.learn.training.yielding import lower_priority, stopped_by_signals

    lower_priority(nice)  # before the imports, which take seconds
    from paceline.learn.data.selection import Selection
    from paceline.learn.training.fine_tune import FineTuneOptions, fine_tune
    from paceline.learn.training.limits import Limits, yielding_on
    from paceline.learn.training.report import Reporter
    from paceline.models.registry import load_checkpoint, resolve
    from paceline.train.job import chosen_device

    options = FineTuneOptions(
        steps=steps,
        minutes=minutes,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
    )
    begin = present_trained(head, source, salt) if since is None else _timestamp(since)
    selection = Selection(begin, replay, salt)
    on_device = chosen_device(device)
    yielding = yielding_on(on_device, Limits(threads, gpu_share, busy_share, activity, end_with_parent))
    report = Reporter(as_json)
    checkpoint = load_checkpoint(resolve(model))
    parent = present_head(head, source, salt, model)
    with stopped_by_signals(yielding):
        candidate = fine_tune(
            checkpoint,
            _store(source),
            parent,
            out,
            options,
            selection,
            generic or (),
            on_device,
            yielding,
            report.progressed,
        )
    report.ended(candidate, out)
    if candidate is None:
        raise typer.Exit(STOPPED)
    if not candidate.gains:
        raise typer.Exit(NOTHING_BETTER)


@app.command("export")
def export_command(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="File of answers to write.")],
    salt: Annotated[
        str, typer.Option(help="Rows of this salt (its hash), or all. Default: rows without a salt.")
    ] = "",
) -> None:
    """Write the kept rows as a file of answers, which every `paceline train` command takes as --data."""
    from paceline.learn.data.selection import usable
    from paceline.train.data.examples import Example, ExampleWriter

    if out.exists():
        raise ConfigError(f"{out} is there already: give another --out.")
    store = TrafficStore(_store(folder))
    damage = Damage()
    rows = [row for row in store.rows(damage=damage) if usable(row, salt, 1 << 30)]
    writer = ExampleWriter(out, store.vocab_size, {"traffic": store.target.fingerprint})
    writer.append(
        Example(
            _example_id(row, number), row.segment, [*row.prompt_ids, *row.output_ids], len(row.prompt_ids)
        )
        for number, row in enumerate(rows)
    )
    writer.close()
    skipped = damage.damaged + damage.cut_off
    left_out = f"; skipped {counted(skipped, 'damaged records')}" if skipped else ""
    note(f"{counted(len(rows), 'answers')}: {out}{left_out}")


@app.command("clear")
def clear_command(folder: Folder) -> None:
    """Delete all kept rows, also while a server runs. Heads that were trained on them stay."""
    store = TrafficStore(_store(folder))
    store.clear()
    note(f"No rows are left in {store.folder}.")


def _store(folder: Path) -> Path:
    """The store in a folder of --learn-dir, or that folder itself if it is a store."""
    inside = LearnFolder(folder).traffic
    return inside if inside.exists() else folder


def _lines(count: StoreCount) -> list[str]:
    lines = [f"rows       {count.rows}, {count.bytes / 1e6:.1f} MB"]
    if count.oldest is not None and count.newest is not None:
        lines.append(f"from       {_local(count.oldest)} to {_local(count.newest)}")
    skipped = count.damage.damaged + count.damage.cut_off
    return [*lines, f"damaged    {skipped} records, which are skipped"] if skipped else lines


def _head_lines(history: History) -> list[str]:
    lines = [f"head       {history.current().number or '0, the one that the server was started with'}"]
    accepted = history.live().get("accepted", {})
    if total := sum(accepted.values()):
        shares = ", ".join(f"{name} {count / total:.0%}" for name, count in sorted(accepted.items()))
        lines.append(f"drafters   {shares} of the accepted tokens since the server's start")
    for made in history.decisions()[-SHOWN_DECISIONS:]:
        told = f"{made['decision']}, head {made['head']}: {made.get('reason', '')}"
        lines.append(f"{_local(made['time'])}  {told}")
    return lines


def _local(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _example_id(row: TrafficRow, number: int) -> str:
    """An id whose part before # names the prompt: all answers to it are held out together, or none."""
    import hashlib

    prompt = hashlib.blake2b(repr(row.prompt_ids).encode(), digest_size=8).hexdigest()
    return f"{prompt}#{number}"


def _timestamp(text: str) -> float:
    """The seconds since 1970 of a time as --since takes it."""
    try:
        return float(text)
    except ValueError:
        pass
    for form in ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d"):
        try:
            return time.mktime(time.strptime(text, form))
        except ValueError:
            continue
    raise ConfigError(
        f"--since must be a time such as 2026-11-17T09:30, or seconds since 1970, got {text!r}."
    )
