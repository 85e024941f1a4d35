"""Errors over HTTP: {"error": {"message", "type", "param", "code"}}, as OpenAI writes them, or as the API of
the path does.

A message never names a path of this machine. An error of our own code shows the client only the
request id; the log has the traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.types import Scope

from paceline.errors import (
    ExhaustedError,
    GrammarError,
    OverloadedError,
    PacelineError,
    RequestError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1200  # characters; error messages quote client input, which may be long
RETRY_AFTER = "1"  # seconds, sent with 429
CLIENT_GONE = 499  # status in logs and metrics; no client receives it

# status and type of each exception class; anything else is a 500
_KINDS: dict[type[Exception], tuple[int, str]] = {
    RequestError: (400, "invalid_request_error"),
    GrammarError: (400, "invalid_request_error"),
    ExhaustedError: (400, "invalid_request_error"),
    OverloadedError: (429, "rate_limit_error"),
    UnavailableError: (503, "service_unavailable_error"),
}


class ApiError(PacelineError):
    """An error with its own HTTP status, such as 404 for an unknown model."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class ClientGone(Exception):
    """The client has closed the connection; no answer can be sent."""


class FieldError(RequestError):
    """A request field is invalid; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def error_body(
    message: str, kind: str, param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """An error body in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class ErrorForm:
    """How one API writes errors, given an error in OpenAI's form."""

    write: Callable[[int, dict[str, Any], str | None], dict[str, Any]]  # of status, body and request id
    event: str | None = None  # name of the event in a stream
    ends_with_done: bool = True  # [DONE] follows that event


def _anthropic(status: int, body: Mapping[str, Any], request_id: str | None) -> dict[str, Any]:
    """The error as Anthropic writes it; its types go by the status."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": body["error"]["message"]}
    return {"type": "error", "error": error, "request_id": request_id}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OPENAI_FORM = ErrorForm(lambda status, body, request_id: body)
_FORMS = {"/v1/messages": ErrorForm(_anthropic, "error", ends_with_done=False)}  # by the start of the path


def error_form(scope: Scope) -> ErrorForm:
    """How the API at the path of a request writes errors."""
    path = get_route_path(scope)
    return next((form for start, form in _FORMS.items() if path.startswith(start)), _OPENAI_FORM)


def error_response(
    scope: Scope, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The response to a request with an error, which `body` has in OpenAI's form."""
    request_id = scope.get("state", {}).get("request_id")
    return JSONResponse(error_form(scope).write(status, body, request_id), status, headers)


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an exception; also used for errors inside a stream."""
    if isinstance(error, ApiError):
        return error.status, error_body(str(error), "invalid_request_error", error.param, error.code)
    for kind, (status, name) in _KINDS.items():
        if isinstance(error, kind):
            return status, error_body(str(error)[:MAX_MESSAGE], name, getattr(error, "param", None))
    return 500, error_body(
        "the server failed on this request; its log tells why, under the request's id.", "server_error"
    )


def response(request: Request, error: BaseException) -> JSONResponse:
    """The HTTP response to an exception. Server errors are logged."""
    status, body = describe(error)
    if status == 500:
        logger.error("a request failed", exc_info=error)
    headers = {"Retry-After": RETRY_AFTER} if status in (429, 503) else None
    return error_response(request.scope, status, body, headers)


def add_handlers(app: FastAPI) -> None:
    """Make every exception of the app an error in the form of the API at its path."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]  # of a path or query parameter; JsonRoute validates bodies
        name = ".".join(str(part) for part in first["loc"][1:])
        return response(request, FieldError(name, f"{name}: {first['msg']}."))

    @app.exception_handler(PacelineError)
    async def refused(request: Request, error: PacelineError) -> JSONResponse:
        return response(request, error)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        body = error_body(str(error.detail), kind)
        return error_response(request.scope, error.status_code, body, getattr(error, "headers", None))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return response(request, error)
