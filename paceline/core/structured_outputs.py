"""StructuredOutputsParams: the constraint on a request's output. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError
from paceline.options import check_bool, refuse_unknown

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@refuse_unknown(RequestError)
@dataclass(frozen=True)
class StructuredOutputsParams:
    """The constraint on an output: exactly one of json, json_object, regex, choice and grammar.

    Only types are checked here. GrammarCompiler checks sizes and compiles.
    """

    json: str | Mapping[str, Any] | None = None  # a JSON schema, or the text of one
    json_object: bool | None = None  # True: any JSON object
    regex: str | None = None  # the whole output matches it, in the syntax of Rust's regex
    choice: Sequence[str] | None = None  # the output is one of these
    grammar: str | None = None  # a Lark or GBNF grammar
    # a regular expression for the optional white space of JSON; None: one space after each comma and colon
    # and none elsewhere, so that as many tokens as possible are forced
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        """Check every field and normalize it."""
        if self.json_object is not None:
            check_bool(RequestError, "json_object", self.json_object)
            object.__setattr__(self, "json_object", self.json_object or None)  # False asks for nothing
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}, got {found}. "
                "Leave the others out."
            )
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise RequestError(
                f"json must be a JSON schema, as an object or as text, got {type(self.json).__name__}."
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestError(f"{name} must be a text that is not empty, got {text!r:.80}.")
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choice(self.choice))
        if self.whitespace_pattern is not None and not self.kind.startswith("json"):
            raise RequestError(f"whitespace_pattern is for JSON, but {self.kind} is given. Leave it out.")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)


def as_structured_outputs(given: object) -> StructuredOutputsParams | None:
    """The params of a user's object or mapping; None for None."""
    if given is None or isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, Mapping):
        raise RequestError(
            "structured_outputs must be an object such as {'json': {'type': 'object'}} or "
            f"{{'regex': '[0-9]+'}}, got {type(given).__name__}."
        )
    return StructuredOutputsParams(**{str(name): value for name, value in given.items()})


def _checked_choice(choice: object) -> tuple[str, ...]:
    if (
        isinstance(choice, str)
        or not isinstance(choice, Sequence)
        or not choice
        or not all(isinstance(text, str) and text for text in choice)
    ):
        raise RequestError(f"choice must be a list of texts that are not empty, got {choice!r:.80}.")
    return tuple(dict.fromkeys(choice))
