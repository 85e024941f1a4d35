"""`/docs`: a page that describes the API, made in the browser from /openapi.json. It needs no internet."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from paceline.serve.middleware import DOCS

# no script, style or connection from another origin
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


def router() -> APIRouter:
    """The route of the page."""
    page = files("paceline.serve").joinpath("static/docs.html").read_text("utf-8")
    routes = APIRouter()

    @routes.get(DOCS, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    return routes
