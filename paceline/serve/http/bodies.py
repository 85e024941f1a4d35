"""Request bodies: bytes to a validated model, and validation errors to messages.

JSON is read strictly: what two parsers would read differently (duplicate keys, NaN, lone surrogates)
is refused. Bodies with too many values are refused before they are parsed, because parsing and
validation hold the GIL and so stop every other request.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, get_args

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from paceline.errors import RequestError
from paceline.options import unknown_option
from paceline.serve.http.errors import ApiError, FieldError
from paceline.serve.http.scanning import MAX_DEPTH, shape_of
from paceline.serve.openai.fields import Unsupported
from paceline.serve.queue_slots import is_large
from paceline.serve.routes.models import Models

# Limits of one body. Each bounds how long parsing may hold the GIL.
MAX_VALUES = 300_000  # JSON values: 64 prompts of 4,096 token ids and some; parsing takes 0.12 us each, 36 ms
MAX_CONTAINERS = 20_000  # lists and objects; they cost several times a scalar, also in the collector
MAX_KEYS = 2048  # of one object: twice what logit_bias may have; each unknown key is a validation error
MAX_DIGITS = 512  # digits of one number; the time to parse it grows with their square
MAX_COMPLAINTS = 64  # validation errors that are examined for the message
MAX_QUOTED = 80  # characters of the client's input that an error message quotes
_BOUNDS = {"less_than_equal", "less_than", "greater_than_equal", "greater_than"}
_OBJECTS = {"model_type", "model_attributes_type", "dict_type"}

# field names that a message may begin with in other words, and the fields that they stand for
_ABOUT = {
    "Message": ("messages", "input"),
    "messages": ("input",),
    "prompt": ("messages", "input"),
    "token": ("prompt",),
    "num_speculative_tokens": ("speculative",),
    "branching": ("speculative",),
    "depth": ("speculative",),
    "strict": ("speculative",),
}


def json_route(models: Models) -> type[APIRoute]:
    """The route class for JSON bodies; its errors name the field that is wrong.

    A request holds a slot in the engine's queue until its handler has submitted or answered it.
    """
    shape_of(b"{}")  # compile it now, not during the first request

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            body_field = self.body_field
            if body_field is None:
                return handle
            model: type[BaseModel] = body_field.field_info.annotation  # type: ignore[assignment]

            async def read_and_handle(request: Request) -> Response:
                _check_content_type(request)
                read = _JsonRequest(request.scope, request.receive)
                raw = await read.body()
                with await models.queue_slots.reserve(len(raw)) as slot:
                    request.state.queue_slot = slot
                    if is_large(len(raw)):
                        read.data = await models.default.in_thread(_read_alone, models, raw, model)
                    else:
                        read.data = read_body(raw, model)
                    try:
                        return await handle(read)
                    except RequestError as error:
                        raise _with_param(error, model) from error

            return read_and_handle

    return JsonRoute


class _JsonRequest(Request):
    """A request whose body is already parsed and validated; FastAPI takes the model instance as it is."""

    data: BaseModel

    async def json(self) -> Any:
        return self.data


def _read_alone(models: Models, raw: bytes, model: type[BaseModel]) -> BaseModel:
    """The validated model of a large body. One at a time: two would only alternate on the GIL."""
    with models.queue_slots.reading:
        return read_body(raw, model)


def read_body(raw: bytes, model: type[BaseModel]) -> BaseModel:
    """The validated model of a body. Raises FieldError if it is not valid."""
    data = parse_json(raw)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        complaints = error.errors(include_url=False, include_context=False)[:MAX_COMPLAINTS]
        raise validation_error(complaints, model, data) from None


def parse_json(raw: bytes) -> Any:
    """The parsed JSON of a body. Raises FieldError if it is not unambiguous JSON, or too large."""
    if not raw:
        raise FieldError("body", "the body is empty: send a JSON object.")
    shape = shape_of(raw)
    if shape.depth > MAX_DEPTH:
        raise _too_much(f"more than {MAX_DEPTH} lists and objects in each other")
    if shape.containers > MAX_CONTAINERS:
        raise _too_much(f"{shape.containers} lists and objects, and at most {MAX_CONTAINERS} are taken")
    if shape.keys > MAX_KEYS:
        raise _too_much(f"an object of {shape.keys} keys, and at most {MAX_KEYS} are taken")
    if shape.values > MAX_VALUES:
        raise _too_much(f"about {shape.values} values, and at most {MAX_VALUES} are taken")
    if shape.digits > MAX_DIGITS:
        raise _too_much(f"a number of {shape.digits} digits, and at most {MAX_DIGITS} are taken")
    try:
        text = raw.decode("utf-8")
        data = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError:
        raise FieldError("body", "the body is not UTF-8.") from None
    except ValueError as error:
        raise FieldError("body", f"the body is not JSON: {str(error)[:200]}.") from None
    if shape.lone_surrogates:
        raise FieldError("body", "a text in the body has half a surrogate pair, which is no character.")
    return data


def _too_much(what: str) -> FieldError:
    return FieldError("body", f"the body has {what}. Send less, or several requests.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise FieldError("body", f"an object in the body has the key {_shown(twice)} twice.")
    return members


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415, f"the body must be JSON: send Content-Type: application/json, not {_shown(kind)}.", "body"
        )


def validation_error(errors: Sequence[Any], model: type[BaseModel], data: Any) -> FieldError:
    """One FieldError for pydantic's `errors`, about the one place in `data` that they point to first.

    Of a union's members, the one with the deepest errors is taken to be the one that the client meant.
    """
    first = _path_of(errors[0], data)
    paths = [_path_of(error, data) for error in errors]
    path = max((candidate for candidate in paths if candidate[: len(first)] == first), key=len)
    name = ".".join(str(part)[:MAX_QUOTED] for part in path)
    at_place = [error for error, found in zip(errors, paths, strict=True) if found == path]
    if at_place[0]["type"] == "extra_forbidden":
        return FieldError(
            name,
            unknown_option(
                str(path[-1])[:MAX_QUOTED],
                _fields_at(model, path),
                "this request",
                "See /docs for those of each path.",
            ),
        )
    wrong = " or ".join(dict.fromkeys(map(_message, at_place)))
    return FieldError(name or "body", f"{name or 'the body'} {wrong}.")


def _path_of(error: Any, data: Any) -> tuple[str | int, ...]:
    """The path to the error in the data: pydantic's location without its names of union members."""
    path: list[str | int] = []
    parts = error["loc"]
    for number, part in enumerate(parts):
        within = part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int)
        if within:
            data = data[part]
        elif error["type"] != "missing" or number < len(parts) - 1:
            continue
        path.append(part)
    return tuple(path)


def _message(error: Any) -> str:
    """What is wrong, as words that follow the field's name."""
    kind = error["type"]
    if kind == "missing":
        return "is missing"
    if kind in _OBJECTS:
        return "should be an object"
    message = re.sub(r"^(Input|String|List|Dictionary|Value) should", "should", str(error["msg"]))
    return f"{message}, got {error['input']!r:.40}" if kind in _BOUNDS else message.rstrip(".")


def _fields_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The field names that the object at a path of the body may have."""
    models = [model]
    for part in path[:-1]:
        deeper = [
            inner
            for outer in models
            for name, field in outer.model_fields.items()
            if part == (field.alias or name)
            for inner in _models_in(field.annotation)
        ]
        models = deeper or models
    return [
        field.alias or name
        for model in models
        for name, field in model.model_fields.items()
        if not any(isinstance(mark, Unsupported) for mark in field.metadata)
    ]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models that a type annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _with_param(error: RequestError, model: type[BaseModel]) -> RequestError:
    """The error with `param` set to the field that its message begins with, if the body has that field.

    The engine's messages begin with the option's name: "min_tokens must be at most ...".
    """
    if getattr(error, "param", None) is not None:
        return error
    named = re.match(r"(?:the |a token id of |an id of )?(\w+)(?!['\w])", str(error))
    name = named[1] if named else ""
    served = _fields_at(model, [name])
    meant = next((field for field in (name, *_ABOUT.get(name, ())) if field in served), None)
    return FieldError(meant, str(error)) if meant is not None else error


def _shown(text: str) -> str:
    return repr(text[:MAX_QUOTED])
