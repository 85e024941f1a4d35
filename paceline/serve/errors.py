"""Errors over HTTP: {"error": {"message", "type", "param", "code"}}, as OpenAI writes them.

A message never names a path of this machine. An error of our own code shows the client only the
request id; the log has the traceback.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from paceline.errors import GrammarError, OverloadedError, PacelineError, RequestError, UnavailableError

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1200  # characters; error messages quote client input, which may be long
RETRY_AFTER = "1"  # seconds, sent with 429
CLIENT_GONE = 499  # status in logs and metrics; no client receives it

# status and type of each exception class; anything else is a 500
_KINDS: dict[type[Exception], tuple[int, str]] = {
    RequestError: (400, "invalid_request_error"),
    GrammarError: (400, "invalid_request_error"),
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


def response(error: BaseException) -> JSONResponse:
    """The HTTP response to an exception. Server errors are logged."""
    status, body = describe(error)
    if status == 500:
        logger.error("a request failed", exc_info=error)
    headers = {"Retry-After": RETRY_AFTER} if status in (429, 503) else None
    return JSONResponse(body, status, headers)


def add_handlers(app: FastAPI) -> None:
    """Make every exception of the app an error in OpenAI's form."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]  # of a path or query parameter; JsonRoute validates bodies
        name = ".".join(str(part) for part in first["loc"][1:])
        return response(FieldError(name, f"{name}: {first['msg']}."))

    @app.exception_handler(PacelineError)
    async def refused(_: Request, error: PacelineError) -> JSONResponse:
        return response(error)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return JSONResponse(
            error_body(str(error.detail), kind), error.status_code, getattr(error, "headers", None)
        )

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return response(error)
