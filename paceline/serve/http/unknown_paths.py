"""Answers to paths and methods that the server does not have: what to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException

from paceline.serve.http.errors import error_body, error_response

MAX_QUOTED = 80  # characters of the path that the message quotes
# what OpenAI's or vLLM's API has beside generating text: first parts of a path, without /v1
NOT_SERVED = {
    "embeddings": "embeddings",
    "pooling": "embeddings",
    "rerank": "ranking",
    "score": "ranking",
    "classify": "classification",
    "moderations": "moderation",
    "audio": "audio",
    "images": "images",
    "videos": "videos",
    "files": "files",
    "uploads": "files",
    "batches": "batches of files",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants",
    "threads": "assistants",
    "vector_stores": "vector stores",
    "realtime": "realtime sessions",
}
ADAPTERS = "adapters are loaded at the start, by --lora-modules NAME=FOLDER; requests name one as MODEL:NAME"
# what to do instead of asking for these paths
INSTEAD = {"load_lora_adapter": ADAPTERS, "unload_lora_adapter": ADAPTERS}
# other names for a path of ours: Ollama's, llama.cpp's, text-generation-inference's
ALIASES = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/completion": "/v1/completions",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
    "/invocations": "/v1/chat/completions",
    "/info": "/v1/models",
    "/props": "/v1/models",
    "/healthz": "/health",
    "/livez": "/health",
    "/readyz": "/health",
    "/redoc": "/docs",
    "/swagger": "/docs",
    "/v1": "/v1/models",
}
# what base URL clients need for the paths that start so; the first that fits
BASES = {
    "/v1/messages": " Anthropic's clients append /v1 themselves: leave it out of their base URL.",
    "/v1/": " OpenAI's clients need a base URL that ends in /v1.",
}


def add_handlers(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Answer an unknown path, and a method that a path does not have, with what these routers have."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    served = [route.path for route in routes if "{" not in route.path]

    @app.exception_handler(404)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        message = advice(get_route_path(request.scope), served)
        body = error_body(message, "invalid_request_error", code="unknown_url")
        return error_response(request.scope, 404, body)

    @app.exception_handler(405)
    async def other_method(request: Request, error: HTTPException) -> JSONResponse:
        headers = error.headers or {}
        path, methods = get_route_path(request.scope)[:MAX_QUOTED], headers.get("Allow", "another method")
        message = f"{path} does not take {request.method}: use {methods}."
        body = error_body(message, "invalid_request_error", code="method_not_supported")
        return error_response(request.scope, 405, body, headers)


def advice(path: str, served: Iterable[str]) -> str:
    """The message for a path that is not among the served ones."""
    shown, plain = path[:MAX_QUOTED], "/" + path.strip("/")
    first = plain.removeprefix("/v1").strip("/").partition("/")[0]
    if first in NOT_SERVED:
        return (
            f"{shown} is not served: this server generates text, and has no {NOT_SERVED[first]}. See /docs."
        )
    if first in INSTEAD:
        return f"{shown} is not served: {INSTEAD[first]}."
    meant = ALIASES.get(plain) or _nearest(plain, list(served))
    if meant is None:
        return f"there is no {shown} here. See /docs for all paths."
    base = next((hint for start, hint in BASES.items() if meant.startswith(start)), "")
    return f"there is no {shown} here: use {meant}.{base}"


def _nearest(path: str, served: list[str]) -> str | None:
    """The served path with the same end, as with a wrong base URL; else the most similar one."""
    ends = [other for other in served if other != "/" and (other.endswith(path) or path.endswith(other))]
    if path != "/" and ends:
        return max(ends, key=len)
    return next(iter(difflib.get_close_matches(path[:MAX_QUOTED], served, n=1, cutoff=0.7)), None)
