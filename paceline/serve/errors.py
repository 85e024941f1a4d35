"""Errors over HTTP: {"error": {"message", "type", "param", "code"}}, as OpenAI writes them.

A message never names a path of this machine, and an error of our own code tells nothing but the
request's id: the log has the rest.
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

MOST_MESSAGE = 1200  # characters; clients may send long values, and need not get them back
RETRY_AFTER = "1"  # seconds, told to clients that come when the queue is full
CLIENT_GONE = 499  # for the log: nobody gets it

# what a client is told for each family of errors; everything else is a 500
_KINDS: dict[type[Exception], tuple[int, str]] = {
    RequestError: (400, "invalid_request_error"),
    GrammarError: (400, "invalid_request_error"),
    OverloadedError: (429, "rate_limit_error"),
    UnavailableError: (503, "service_unavailable_error"),
}


class ApiError(PacelineError):
    """An error with its own HTTP status, such as a model that is not served here."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class ClientGone(Exception):
    """The client has closed the connection: nobody waits for an answer."""


class FieldError(RequestError):
    """A field of a request is wrong: `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def error_body(
    message: str, kind: str, param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The status and the body that tell a client of this error; also used inside a stream that has begun."""
    if isinstance(error, ApiError):
        return error.status, error_body(str(error), "invalid_request_error", error.param, error.code)
    for kind, (status, name) in _KINDS.items():
        if isinstance(error, kind):
            return status, error_body(str(error)[:MOST_MESSAGE], name, getattr(error, "param", None))
    return 500, error_body(
        "the server failed on this request; its log tells why, under the request's id.", "server_error"
    )


def response(error: BaseException) -> JSONResponse:
    """The HTTP answer to an error. One that is not the client's fault is logged."""
    status, body = describe(error)
    if status == 500:
        logger.error("a request failed", exc_info=error)
    headers = {"Retry-After": RETRY_AFTER} if status in (429, 503) else None
    return JSONResponse(body, status, headers)


def add_handlers(app: FastAPI) -> None:
    """Answer every error of the app in OpenAI's form."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]  # of a path or a query; JsonRoute tells of bodies
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
