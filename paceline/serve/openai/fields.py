"""Types of request fields, and the fields of every endpoint that samples for constraints on its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from paceline.constrain.limits import GrammarLimits
from paceline.serve.http.errors import FieldError

MAX_NAME = 256  # characters of a name: segment, salt, user


class Body(BaseModel):
    """A request body or an object in it. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def _integral(value: Any) -> Any:
    """An integral float as int: JSON has one number type, so 16.0 is an integer too."""
    return int(value) if type(value) is float and value.is_integer() else value


# strict: pydantic would accept "1" for 1 and 1 for true, which are mistakes of the client
Int = Annotated[int, Field(strict=True), BeforeValidator(_integral)]
# its bounds are checked on the integer itself: on a field, pydantic would round them to a float
Seed = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64), BeforeValidator(_integral)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(max_length=MAX_NAME)]


def _as_it_is(value: Any) -> Any:
    """The value unchanged. The Python call lets other threads take the GIL between two items of a list."""
    return value


Item = TypeVar("Item")
# a list that is refused at its first invalid item: there may be thousands more
Items: TypeAlias = Annotated[list[Annotated[Item, BeforeValidator(_as_it_is)]], Field(fail_fast=True)]


def _all_integral(values: Any) -> Any:
    """`_integral` for long lists: no Python call per item if all are integers."""
    if isinstance(values, list) and float in set(map(type, values)):
        return [_integral(value) for value in values]
    return values


TokenIds = Annotated[
    list[Annotated[int, Field(strict=True, ge=0)]], Field(fail_fast=True), BeforeValidator(_all_integral)
]


@dataclass(frozen=True)
class Unsupported:
    """Marks a field that this server does not support: only neutral values are accepted.

    The field's type says which those are; `remedy` is the error message for any other value.
    """

    remedy: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        remedy = self.remedy  # not a template: without a context, pydantic leaves braces as they are

        def check(value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
            try:
                return inner(value)
            except ValidationError:
                raise PydanticCustomError("unsupported", remedy) from None

        return core_schema.no_info_wrap_validator_function(check, handler(source))


Zero = Annotated[Int, Field(ge=0, le=0)]
One = Annotated[Float, Field(ge=1, le=1)]
NoItems = Annotated[list[Any], Field(max_length=0)]
NoFields = Annotated[dict[str, Any], Field(max_length=0)]


class NeutralFields(Body):
    """Fields that vLLM's clients send with their defaults. Other values are refused."""

    length_penalty: Annotated[
        One | None, Unsupported("is not served: it is for beam search. Leave it out, or set it to 1")
    ] = None
    use_beam_search: Annotated[Literal[False] | None, Unsupported("is not served: use n, and choose")] = None
    spaces_between_special_tokens: Annotated[
        Literal[True] | None,
        Unsupported("is not served: special tokens are spelled as they are. Leave it out, or set it to true"),
    ] = None
    truncate_prompt_tokens: Annotated[None, Unsupported("is not served: shorten the prompt yourself")] = None
    priority: Annotated[Zero | None, Unsupported("is not served: requests run in order. Set it to 0")] = None
    kv_transfer_params: Annotated[NoFields | None, Unsupported("is not served: leave it out")] = None
    vllm_xargs: Annotated[NoFields | None, Unsupported("is not served: leave it out")] = None


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
