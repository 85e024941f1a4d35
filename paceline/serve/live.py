"""`/`: a live page of the server. It reads /metrics and /requests, and loads nothing from elsewhere.

The page and its files hold nothing of the server and need no API key; what they read does.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, HTTPException, Response

from paceline.serve.middleware import PAGE, STATIC

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
