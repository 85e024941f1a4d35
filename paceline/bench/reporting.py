"""Where results of `paceline bench` go, and the flags that its commands share."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.errors import ConfigError

Model = Annotated[str, typer.Argument(help="An alias, a .gguf file, a folder or a hub id.")]
Threads = Annotated[int | None, typer.Option(help="Threads; one for each core if not given.")]
Quantization = Annotated[
    str, typer.Option(help="How the cpu backend keeps weights: auto, native, int8, none.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all results to this file.")
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots to this file.")
]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        help="A file of JSON lines, or code-edit, summarize, extract, chat, writing. May be repeated.",
    ),
]


PIPED_WIDTH = 240  # columns: more than any table has


class Report:
    """Where results go: to the terminal and, if one is named, into a JSON file."""

    def __init__(self, json_file: Path | None) -> None:
        """Refuse a file that cannot be written before minutes are spent on its contents."""
        from paceline.bench.machine import machine_facts

        check_writable("--json", json_file)
        self._json_file = json_file
        self.machine = machine_facts()  # now, for its load

    def show(self, tables: Sequence[Table], notes: Sequence[str], facts: dict[str, Any]) -> None:
        """Print the tables, the notes and the machine, and write the file."""
        from paceline.bench.tables import machine_notes

        console = report_console()
        for table in tables:
            console.print(table)
        for note in (*notes, *machine_notes(self.machine, facts.get("threads"), facts.get("quantization"))):
            console.print(note, highlight=False, markup=False, soft_wrap=True)
        if self._json_file is not None:
            self._json_file.write_text(json.dumps({**facts, "machine": self.machine}, indent=2) + "\n")


def report_console() -> Console:
    """Standard output; what is piped has no width, so there nothing is cut."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=PIPED_WIDTH)


def check_writable(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        raise ConfigError(f"{option} {file} cannot be written: give a file in a folder that exists.")


def integers(option: str, text: str) -> list[int]:
    """The positive numbers of a list such as 1,4,16."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"{option} must be positive numbers with commas between, such as 1,4,16; got {text!r}."
        )
    return numbers
