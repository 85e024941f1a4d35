"""The pages of the server: `/` is live and reads /metrics and /requests, `/docs` describes the API.

They load nothing from elsewhere, hold nothing of the server and need no API key; what they read does.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import HTMLResponse

from paceline.serve.http.middleware import DOCS, PAGE, STATIC

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# files of this server only, and none of it inside another page
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_DOCS_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
_HEADERS = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}


def router() -> APIRouter:
    """The routes of the live page and of its files."""
    folder = files("paceline.serve").joinpath("static")
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    routes = APIRouter()

    def answer(name: str) -> Response:
        return Response(contents[name], media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)

    @routes.get(PAGE, include_in_schema=False)
    async def page() -> Response:
        return answer("live.html")

    @routes.get(STATIC + "{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404)
        return answer(name)

    return routes


def docs_router() -> APIRouter:
    """The route of the description, which the browser makes from /openapi.json."""
    page = files("paceline.serve").joinpath("static/docs.html").read_text("utf-8")
    routes = APIRouter()

    @routes.get(DOCS, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _DOCS_POLICY})

    return routes
