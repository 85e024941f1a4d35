"""Request bodies: from bytes to a checked model, and from what is wrong with them to a message.

JSON is taken strictly: what two parsers would read differently (a key twice, NaN, half a
surrogate pair) is refused. So is what has too many values, before it is parsed: parsing and checking
hold the GIL, and with it every other client.
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
from paceline.serve.errors import ApiError, FieldError
from paceline.serve.fields import Unsupported
from paceline.serve.scanning import MOST_DEPTH, shape_of
from paceline.serve.service import Service, is_large

# of a body; what each of them costs is the time that the GIL is held in one go
MOST_VALUES = 300_000  # 64 prompts of 4,096 token ids, and some; parsing takes 0.12 us each, 36 ms
MOST_CONTAINERS = 20_000  # lists and objects: several times as expensive, and tracked by the collector
MOST_KEYS = 2048  # of one object, twice what logit_bias may have; each that is unknown is an error of its own
MOST_DIGITS = 512  # of a number: the time to read one grows with their square
MOST_TOLD = 64  # complaints that are looked at, to tell of those at the first place
MOST_SHOWN = 80  # characters of a client's own words that an error repeats
_BOUNDS = {"less_than_equal", "less_than", "greater_than_equal", "greater_than"}
_OBJECTS = {"model_type", "model_attributes_type", "dict_type"}

# what messages begin with where that is not the name of a field, and the fields that may be meant
_ABOUT = {
    "Message": ("messages", "input"),
    "messages": ("input",),
    "prompt": ("messages", "input"),
    "token": ("prompt",),
    "num_speculative_tokens": ("speculative",),
    "branching": ("speculative",),
    "depth": ("speculative",),
}


def json_route(service: Service) -> type[APIRoute]:
    """Routes whose body is JSON, and whose errors name the field that is wrong.

    A body takes a place in the queue until its handler has started or answered its request.
    """
    shape_of(b"{}")  # compiled now, not while a client waits

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
                with await service.place(len(raw)) as place:
                    request.state.place = place
                    if is_large(len(raw)):
                        read.data = await service.in_thread(_read_alone, service, raw, model)
                    else:
                        read.data = read_body(raw, model)
                    try:
                        return await handle(read)
                    except RequestError as error:
                        raise _with_param(error, model) from error

            return read_and_handle

    return JsonRoute


class _JsonRequest(Request):
    """A request whose body has been read. FastAPI takes a model that is made already as it is."""

    data: BaseModel

    async def json(self) -> Any:
        return self.data


def _read_alone(service: Service, raw: bytes, model: type[BaseModel]) -> BaseModel:
    """The model that a large body spells. One at a time: two would take turns with the GIL between them."""
    with service.reading:
        return read_body(raw, model)


def read_body(raw: bytes, model: type[BaseModel]) -> BaseModel:
    """The model that a body spells. FieldError if it spells none."""
    data = parse_json(raw)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        complaints = error.errors(include_url=False, include_context=False)[:MOST_TOLD]
        raise validation_error(complaints, model, data) from None


def parse_json(raw: bytes) -> Any:
    """The value that a body spells. FieldError if it is not JSON that can be read in one way only."""
    if not raw:
        raise FieldError("body", "the body is empty: send a JSON object.")
    shape = shape_of(raw)
    if shape.depth > MOST_DEPTH:
        raise _too_much(f"more than {MOST_DEPTH} lists and objects in each other")
    if shape.containers > MOST_CONTAINERS:
        raise _too_much(f"{shape.containers} lists and objects, and at most {MOST_CONTAINERS} are taken")
    if shape.keys > MOST_KEYS:
        raise _too_much(f"an object of {shape.keys} keys, and at most {MOST_KEYS} are taken")
    if shape.values > MOST_VALUES:
        raise _too_much(f"about {shape.values} values, and at most {MOST_VALUES} are taken")
    if shape.digits > MOST_DIGITS:
        raise _too_much(f"a number of {shape.digits} digits, and at most {MOST_DIGITS} are taken")
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
    made = dict(pairs)
    if len(made) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise FieldError("body", f"an object in the body has the key {_shown(twice)} twice.")
    return made


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
    """The error that tells of pydantic's complaints about `data` as a `model`: of those at one place.

    Of the members of a union, the one that got deepest is the one that was meant.
    """
    first = _place(errors[0], data)
    places = [_place(error, data) for error in errors]
    place = max((one for one in places if one[: len(first)] == first), key=len)
    name = ".".join(str(part)[:MOST_SHOWN] for part in place)
    here = [error for error, one in zip(errors, places, strict=True) if one == place]
    if here[0]["type"] == "extra_forbidden":
        return FieldError(
            name, unknown_option(str(place[-1])[:MOST_SHOWN], _fields_at(model, place), "this request")
        )
    wrong = " or ".join(dict.fromkeys(map(_message, here)))
    return FieldError(name or "body", f"{name or 'the body'} {wrong}.")


def _place(error: Any, data: Any) -> tuple[str | int, ...]:
    """Where in the data the error is: pydantic's place without its names for the members of unions."""
    place: list[str | int] = []
    parts = error["loc"]
    for number, part in enumerate(parts):
        within = part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int)
        if within:
            data = data[part]
        elif error["type"] != "missing" or number < len(parts) - 1:
            continue
        place.append(part)
    return tuple(place)


def _message(error: Any) -> str:
    """What is wrong, to be read after the field's name."""
    kind = error["type"]
    if kind == "missing":
        return "is missing"
    if kind in _OBJECTS:
        return "should be an object"
    message = re.sub(r"^(Input|String|List|Dictionary|Value) should", "should", str(error["msg"]))
    return f"{message}, got {error['input']!r:.40}" if kind in _BOUNDS else message.rstrip(".")


def _fields_at(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """The fields that the object at a place of the body may have."""
    models = [model]
    for part in place[:-1]:
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
        for one in models
        for name, field in one.model_fields.items()
        if not any(isinstance(mark, Unsupported) for mark in field.metadata)
    ]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a type mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models_in(part)]


def _with_param(error: RequestError, model: type[BaseModel]) -> RequestError:
    """The error with the field that its message begins with, if the body has it.

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
    return repr(text[:MOST_SHOWN])
