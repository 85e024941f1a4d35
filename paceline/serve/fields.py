"""Types of request fields: strict JSON types, and fields that OpenAI or vLLM have and this server refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

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
