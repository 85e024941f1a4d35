"""The fields that constrain an output: structured_outputs, and vLLM's older guided_* for the same."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from paceline.constrain.limits import GrammarLimits
from paceline.serve.errors import FieldError
from paceline.serve.fields import Body, Bool, Items

GrammarText = Annotated[str, Field(max_length=GrammarLimits.source_bytes)]  # longer ones are not compiled


class StructuredOutputs(Body):
    """Constraint on the output: exactly one of the first five fields."""

    json_: dict[str, Any] | GrammarText | None = Field(None, alias="json")  # a JSON schema
    json_object: Bool | None = None
    regex: GrammarText | None = None
    choice: Items[GrammarText] | None = None
    grammar: GrammarText | None = None  # Lark or GBNF
    whitespace_pattern: GrammarText | None = None


class StructureFields(Body):
    """At most one constraint on the output."""

    structured_outputs: StructuredOutputs | None = None
    # the same under vLLM's older names
    guided_json: dict[str, Any] | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Items[GrammarText] | None = None
    guided_grammar: GrammarText | None = None
    guided_whitespace_pattern: GrammarText | None = None  # beside guided_json

    def structure(self) -> tuple[str, dict[str, Any]] | None:
        """The field that constrains the output, and the engine's structured_outputs that it asks for."""
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise FieldError(
                given[1],
                f"{' and '.join(given)} cannot be in one request: an output has one form. Leave one out.",
            )
        if self.guided_whitespace_pattern is not None and given != ["guided_json"]:
            raise FieldError(
                "guided_whitespace_pattern",
                "guided_whitespace_pattern is for guided_json: give that too, or leave it out.",
            )
        if not given:
            return None
        if self.structured_outputs is not None:
            return given[0], self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        kind = given[0].removeprefix("guided_")
        constraint = {kind: getattr(self, given[0]), "whitespace_pattern": self.guided_whitespace_pattern}
        return given[0], {name: value for name, value in constraint.items() if value is not None}


_CONSTRAINTS = [name for name in StructureFields.model_fields if name != "guided_whitespace_pattern"]
