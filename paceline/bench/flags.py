"""Flags that several bench commands share, and a command group whose first word may be a model."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.errors import ConfigError
from paceline.terminal.flags import PROMPT_FILE

RUN = "run"

Model = Annotated[str, typer.Argument(help="An alias, a .gguf file, a folder of safetensors or a hub id.")]
HERE = "Engine in this process"
Threads = Annotated[
    int | None, typer.Option(help="Number of CPU threads. Default: one per core.", rich_help_panel=HERE)
]
Quantization = Annotated[
    str, typer.Option(help="Format of weights: auto, native, int8, int4 or none.", rich_help_panel=HERE)
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write all figures to this file as JSON.", rich_help_panel="Output"
    ),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Write a report with charts to this file.", rich_help_panel="Output"
    ),
]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        *PROMPT_FILE,
        help="File of prompts (JSON lines), or code-edit, summarize, extract, chat or writing. Repeatable.",
    ),
]


class MainCommandGroup(TyperGroup):
    """A command group whose first word may be a model instead of a command; it then runs the main command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        word = args[0] if args else ""
        if word and word not in self.commands and word not in ctx.help_option_names:
            near = get_close_matches(word, self.commands, n=1, cutoff=0.8)
            if near and not Path(word).exists():
                ctx.fail(f"There is neither a command nor a model {word!r}. Did you mean {near[0]!r}?")
            args = [RUN, *args]
        return super().parse_args(ctx, args)


def numbers(option: str, text: str) -> list[float]:
    """The positive numbers of a list such as 0.5,2,8."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise ConfigError(
            f"{option} must be positive numbers with commas between, such as 0.5,2,8; got {text!r}."
        )
    return values
