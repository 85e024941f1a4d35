"""Help pages: the common options first, then the others by topic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from paceline.errors import ConfigError
from paceline.peer_options import instead_of

# plain help: rich would truncate long flags
PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"max_content_width": 100},  # columns
}


class TopicCommand(TyperCommand):
    """A command whose help lists its arguments, its common options, and then a section for each topic."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.ignore_unknown_options:  # else they are passed on to another command
            self._refuse_options_of_peers(args)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def _refuse_options_of_peers(self, args: list[str]) -> None:
        known = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for flag in (argument.partition("=")[0] for argument in args):
            if flag.startswith("-") and flag not in known and (told := instead_of(flag, known)):
                raise ConfigError(told)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = getattr(parameter, "rich_help_panel", None) or usual
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence, whole, for a list of commands, which has room for several lines."""
        return super().get_short_help_str(limit=1000)


class App(typer.Typer):
    """A group of commands whose help pages are sorted by topic."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**PLAIN, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        return super().command(name, **{"cls": TopicCommand, **settings})
