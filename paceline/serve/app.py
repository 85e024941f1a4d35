"""The app: which path leads where."""

from __future__ import annotations

from fastapi import FastAPI

from paceline import __version__
from paceline.serve import chat, completions, models, tokens
from paceline.serve.errors import add_handlers
from paceline.serve.service import Service


def make_app(service: Service) -> FastAPI:
    """The HTTP API over a running service."""
    app = FastAPI(title="paceline", version=__version__, docs_url="/docs", redoc_url=None)
    add_handlers(app)
    for part in (models, completions, chat, tokens):
        app.include_router(part.router(service))
    return app
