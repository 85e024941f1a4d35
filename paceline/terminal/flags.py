"""How flags are declared once and shared by commands, named as in Python: max_tokens is --max-tokens.

A command takes a whole group as one dict:

    @app.command()
    @with_flags(engine=ENGINE, sampling=having(SAMPLING, max_tokens=256))
    def generate(prompt: ..., engine: Options, sampling: Options) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import typer

from paceline.errors import ConfigError

Options: TypeAlias = dict[str, Any]
Command = Callable[..., None]


@dataclass(frozen=True)
class Flag:
    """One option of the Python API as a command-line flag."""

    name: str  # as in Python
    kind: Any
    default: Any
    help: str
    spelling: str | None = None  # None: "--" and the name; a switch may have "--on/--off"; aliases: "--a --b"
    topic: str = ""  # the section of the help page; empty: common, so it comes first

    def parameter(self) -> inspect.Parameter:
        """The flag as a parameter for typer."""
        spelling = self.spelling or "--" + self.name.replace("_", "-")
        option = typer.Option(*spelling.split(), help=self.help, rich_help_panel=self.topic or None)
        annotation = Annotated[self.kind, option]  # type: ignore[name-defined]
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=annotation
        )


Group: TypeAlias = tuple[Flag, ...]

# the names of a file of prompts, in every command that takes one; the first is the one in its help's texts
PROMPT_FILE = ("--data", "--workload")


def topic(title: str, *flags: Flag) -> Group:
    """A group whose flags are one section of the help page."""
    return tuple(replace(flag, topic=title) for flag in flags)


def by_topic(group: Group, topics: Mapping[str, str]) -> Group:
    """The group with a section of the help page for each topic, given the names of its flags; the others
    are common. An empty topic makes flags common again."""
    topic_of = {name: topic for topic, names in topics.items() for name in names.split()}
    unknown = topic_of.keys() - {flag.name for flag in group}
    assert not unknown, unknown
    return tuple(replace(flag, topic=topic_of.get(flag.name, flag.topic)) for flag in group)


def having(group: Group, **defaults: Any) -> Group:
    """The group with some defaults replaced."""
    return tuple(
        replace(flag, default=defaults[flag.name]) if flag.name in defaults else flag for flag in group
    )


def without(group: Group, *names: str) -> Group:
    """The group without these flags, for a command where they do not apply."""
    return tuple(flag for flag in group if flag.name not in names)


def with_flags(**groups: Group) -> Callable[[Command], Command]:
    """A decorator: the command's parameter named after a group receives a dict of the group's flags."""

    def decorate(command: Command) -> Command:
        hints = typing.get_type_hints(command, include_extras=True)
        command_parameters = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in groups
        ]
        parameters = [*command_parameters, *(flag.parameter() for group in groups.values() for flag in group)]

        @functools.wraps(command)
        def collected(**values: Any) -> None:
            for group, members in groups.items():
                values[group] = {flag.name: values.pop(flag.name) for flag in members}
            command(**values)

        collected.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        collected.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return collected

    return decorate


def integers(option: str, text: str) -> list[int]:
    """The positive integers of a list such as 1,4,16."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"{option} must be positive numbers with commas between, such as 1,4,16; got {text!r}."
        )
    return numbers
