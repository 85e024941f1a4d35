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
from paceline.learn.folder import LearnFolder
from paceline.learn.history import History
from paceline.terminal.help import App
from paceline.terminal.session import note

Model = Annotated[str, typer.Argument(help="The target: an alias, a .gguf file, a folder or a hub id.")]
Dir = Annotated[Path, typer.Option("--dir", help="The server's --learn-dir.")]
Salt = Annotated[
    str, typer.Option(help="The heads of this salt (its hash), as of a server with --learn-salt.")
]
Traffic = Annotated[Path, typer.Option("--from", help="The folder of --learn-dir.")]
HeadFolder = Annotated[Path, typer.Option("--head", help="Folder of the present head.")]
Candidate = Annotated[Path, typer.Option("--candidate", help="Folder of the head to compare with it.")]
Out = Annotated[Path, typer.Option("--out", help="File for the scores of each row, as JSON.")]

STOPPED = 143  # exit status of a command that was ended
FIRST = Path()  # the head that a server was started with is not in its folder


def add_head_commands(app: App) -> None:
    """Add the commands to `paceline learn`."""
    app.command()(score)
    app.command()(promote)
    app.command()(rollback)


def score(
    source: Traffic,
    head: HeadFolder,
    candidate: Candidate,
    out: Out,
    model: Model = DEFAULT_MODEL,
    salt: Annotated[
        str, typer.Option(help="Rows of this salt (its hash), or all. Default: rows without a salt.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda if available.")] = "auto",
    gpu_share: Annotated[float, typer.Option(help="Share of the time of a GPU to take.")] = 0.1,
    end_with_parent: Annotated[
        bool, typer.Option("--end-with-parent", help="End when the process that started this one ends.")
    ] = False,
    nice: Annotated[int, typer.Option(help="Priority: 19 gives way to everything, 0 is the usual one.")] = 19,
) -> None:
    """Replay held-back answers with two heads, and compare the passes that each would have needed."""
    from paceline.learn.yielding import lower_priority

    lower_priority(nice)  # before the imports, which take seconds
    from paceline.learn.gate import judge
    from paceline.learn.limits import yielding_on
    from paceline.learn.score import score_heads
    from paceline.train.job import chosen_device

    on_device = chosen_device(device)
    may_go_on = yielding_on(on_device, 1, gpu_share, end_with_parent).may_step
    scores = score_heads(model, LearnFolder(source).traffic, (head, candidate), may_go_on, salt, on_device)
    if scores is None:
        raise typer.Exit(STOPPED)
    present, new = scores
    rows = {"present": [asdict(row) for row in present], "candidate": [asdict(row) for row in new]}
    unfinished = out.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(rows))
    os.replace(unfinished, out)
    verdict = judge(present, new)
    note(f"{'passes' if verdict.passes else 'is refused'}: {verdict.reason}")


def promote(
    number: Annotated[int, typer.Argument(help="Number of the head; 0 is the one the server began with.")],
    folder: Dir,
    salt: Salt = "",
) -> None:
    """Let a head serve from now on. A server that runs with this folder follows within seconds."""
    history = _history(folder, salt)
    head = history.promote(number)
    history.note("promoted by hand", head=head.number)
    note(f"Head {head.number} serves.")


def rollback(folder: Dir, salt: Salt = "") -> None:
    """Let the head serve again that served before. A server that runs with this folder follows in seconds."""
    history = _history(folder, salt)
    before, head = history.current().number, history.rollback()
    history.note("rolled back by hand", head=head.number)
    note(f"Head {head.number} serves again, in place of {before}.")


def _history(folder: Path, salt: str) -> History:
    heads = LearnFolder(folder, salt).heads
    if not heads.is_dir():
        raise ConfigError(f"{folder} has no heads yet: give the --learn-dir of a server that has learned.")
    return History(heads, FIRST)
