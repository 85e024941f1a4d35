"""`paceline learn score|promote|rollback`: the heads of a folder of --learn-dir."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError
from paceline.learn.data.folder import NOTHING_BETTER, LearnFolder
from paceline.learn.evaluation.history import History
from paceline.terminal.help import App
from paceline.terminal.session import note

Model = Annotated[str, typer.Argument(help="The target: an alias, a .gguf file, a folder or a hub id.")]
Dir = Annotated[Path, typer.Option("--dir", help="The server's --learn-dir.")]
Salt = Annotated[
    str, typer.Option(help="The heads of this salt (its hash), as of a server with --learn-salt.")
]
Traffic = Annotated[Path, typer.Option("--from", help="The folder of --learn-dir.")]
HeadFolder = Annotated[
    str,
    typer.Option(
        "--head",
        help="Folder of the current head, or shipped. Default: the head that was promoted in --from, if none "
        "was, the shipped one.",
    ),
]
Candidate = Annotated[Path, typer.Option("--candidate", help="Folder of the head to compare with it.")]
GpuShare = Annotated[float, typer.Option(help="Share of the time of a GPU to take.")]
BusyShare = Annotated[
    float | None,
    typer.Option(help="Share to take while --activity says that requests run. Default: --gpu-share."),
]
ServerActivity = Annotated[
    Path | None, typer.Option("--activity", help="File in which a server says whether requests run.")
]
Out = Annotated[Path | None, typer.Option("--out", help="File for the scores of each row, as JSON.")]

CURRENT = "current"  # --head: the one that serves in the folder
STOPPED = 143  # exit status after SIGTERM, as of a shell
FIRST = Path()  # the head that a server was started with is not in its folder


def add_head_commands(app: App) -> None:
    """Add the commands to `paceline learn`."""
    app.command()(score)
    app.command()(promote)
    app.command()(rollback)


def score(
    source: Traffic,
    candidate: Candidate,
    model: Model = DEFAULT_MODEL,
    head: HeadFolder = CURRENT,
    out: Out = None,
    salt: Annotated[
        str, typer.Option(help="Rows of this salt (its hash), or all. Default: rows without a salt.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda if available.")] = "auto",
    gpu_share: GpuShare = 0.1,
    busy_share: BusyShare = None,
    activity: ServerActivity = None,
    end_with_parent: Annotated[
        bool, typer.Option("--end-with-parent", help="End when the process that started this one ends.")
    ] = False,
    nice: Annotated[int, typer.Option(help="Priority: 19 gives way to everything, 0 is the usual one.")] = 19,
    as_json: Annotated[bool, typer.Option("--json", help="Print the progress as JSON.")] = False,
) -> None:
    """Replay held-back answers with two heads, and judge by the passes that each would have needed."""
    from paceline.learn.training.yielding import lower_priority

    lower_priority(nice)  # before the imports, which take seconds
    from paceline.learn.evaluation.acceptance import acceptance_lines
    from paceline.learn.evaluation.gate import judge
    from paceline.learn.evaluation.score import score_heads
    from paceline.learn.training.limits import Limits, yielding_on
    from paceline.train.job import chosen_device

    on_device = chosen_device(device)
    limits = Limits(1, gpu_share, busy_share, activity, end_with_parent)
    may_go_on = yielding_on(on_device, limits).begin_step

    def report(scored: int, planned: int) -> None:
        if as_json:
            typer.echo(json.dumps({"scored": scored, "total": planned}))

    replay = score_heads(
        model,
        LearnFolder(source).traffic,
        present_head(head, source, salt, model),
        candidate,
        may_go_on,
        salt,
        on_device,
        report,
    )
    if replay is None:
        raise typer.Exit(STOPPED)
    if out is not None:
        unfinished = out.with_suffix(".unfinished")
        unfinished.touch(mode=0o600)  # it tells of each row how well its text was guessed
        unfinished.write_text(json.dumps(asdict(replay)))
        os.replace(unfinished, out)
    for line in acceptance_lines(replay):
        note(line)
    verdict = judge(replay)
    note(f"{'passes' if verdict.passes else 'is refused'}: {verdict.reason}")
    if not verdict.passes:
        raise typer.Exit(NOTHING_BETTER)


def promote(
    head: Annotated[
        str,
        typer.Argument(
            help="Number of the head, 0 is the one the server began with; or the folder of a candidate."
        ),
    ],
    folder: Dir,
    salt: Salt = "",
) -> None:
    """Let a head serve from now on. A server that runs with this folder follows within seconds."""
    if head.isdecimal():
        history, number = _history(folder, salt), int(head)
    else:
        history = History(LearnFolder(folder, salt).heads, FIRST)
        number = _add_candidate(Path(head), folder, history)
    promoted = history.promote(number)
    history.note("promoted by hand", head=promoted.number)
    note(f"Head {promoted.number} serves.")


def rollback(folder: Dir, salt: Salt = "") -> None:
    """Let the previous head serve again. A server that runs with this folder follows within seconds."""
    history = _history(folder, salt)
    before, head = history.current().number, history.rollback()
    history.note("rolled back by hand", head=head.number)
    note(f"Head {head.number} serves again, in place of {before}.")


def present_head(named: str, folder: Path, salt: str, model: str) -> Path:
    """The folder of the head that `--head` names, of a learning folder and of the target `model`."""
    from paceline.models.heads.fingerprint import target_fingerprint
    from paceline.models.heads.registry import resolve_head
    from paceline.models.heads.shipped import SHIPPED_HEAD
    from paceline.models.registry import load_checkpoint, resolve

    if named == CURRENT:
        current = _served(folder, salt).current()
        if current.number:
            return current.path
        named = SHIPPED_HEAD
    shipped = named.endswith(SHIPPED_HEAD)
    return resolve_head(
        named, fingerprint=target_fingerprint(load_checkpoint(resolve(model))) if shipped else None
    )


def present_trained(named: str, folder: Path, salt: str) -> float:
    """When the training of that head began, in seconds since 1970; 0 if it was not promoted in the folder."""
    history = _served(folder, salt)
    return history.trained(history.current().number) if named == CURRENT else 0.0


def _served(folder: Path, salt: str) -> History:
    """The heads of the server whose rows have this salt."""
    from paceline.learn.data.selection import ALL_SALTS

    return History(LearnFolder(folder, "" if salt == ALL_SALTS else salt).heads, FIRST)


def _add_candidate(candidate: Path, folder: Path, history: History) -> int:
    """The number of a candidate of `paceline learn train`, which is copied into the history."""
    from paceline.learn.data.store import TrafficStore
    from paceline.learn.training.fine_tune import read_candidate

    found, target = read_candidate(candidate), TrafficStore(LearnFolder(folder).traffic).target
    if found is None:
        raise ConfigError(f"{candidate} has no candidate: give a number, or --out of `paceline learn train`.")
    if found.target != target.fingerprint:
        raise ConfigError(f"{candidate} was trained for another target than {target.name}, that of {folder}.")
    return history.add(candidate, {"trained": found.trained, "rows": dict(found.rows)}).number


def _history(folder: Path, salt: str) -> History:
    heads = LearnFolder(folder, salt).heads
    if not heads.is_dir():
        raise ConfigError(f"{folder} has no heads yet: give the --learn-dir of a server that has learned.")
    return History(heads, FIRST)
