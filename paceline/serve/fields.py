"""Types of request fields: JSON's own, taken strictly, and fields that exist elsewhere but not here."""

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

MOST_NAME = 256  # characters of a name: a segment, a salt, a user


class Body(BaseModel):
    """A request body, or an object in it: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def _integral(value: Any) -> Any:
    """JSON has one kind of number: 16.0 is an integer too."""
    return int(value) if type(value) is float and value.is_integer() else value


# pydantic would take "1" for 1 and 1 for true; a client that sends those has made a mistake
Int = Annotated[int, Field(strict=True), BeforeValidator(_integral)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(max_length=MOST_NAME)]


def _as_it_is(value: Any) -> Any:
    """Python called in between: pydantic would hold the GIL from the first item of a list to the last."""
    return value


Item = TypeVar("Item")
# a list that is refused at its first wrong item: there may be thousands more
Items: TypeAlias = Annotated[list[Annotated[Item, BeforeValidator(_as_it_is)]], Field(fail_fast=True)]


def _all_integral(values: Any) -> Any:
    """_integral for a list that may be long: where all are integers, no Python is called for each."""
    if isinstance(values, list) and float in set(map(type, values)):
        return [_integral(value) for value in values]
    return values


TokenIds = Annotated[
    list[Annotated[int, Field(strict=True, ge=0)]], Field(fail_fast=True), BeforeValidator(_all_integral)
]


@dataclass(frozen=True)
class Unsupported:
    """Marks a field that clients know and this server does not serve: only neutral values pass.

    The field's type says which these are; `remedy` tells those who send another what to do.
    """

    remedy: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        remedy = self.remedy.replace("{", "{{").replace("}", "}}")

        def check(value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
            try:
                return inner(value)
            except ValidationError:
                raise PydanticCustomError("unsupported", remedy) from None

        return core_schema.no_info_wrap_validator_function(check, handler(source))
