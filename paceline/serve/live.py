"""`/`: a live page of the server. It reads /metrics and loads nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

# no script, style or connection from another origin
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


def router() -> APIRouter:
    """The route of the live page."""
    page = files("paceline.serve").joinpath("static/live.html").read_text("utf-8")
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def live() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    return routes
