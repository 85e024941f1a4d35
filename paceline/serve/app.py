"""The FastAPI app: routes and middleware."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from paceline import __version__
from paceline.serve import chat, completions, health, live, metrics_page, models, responses, tokens
from paceline.serve.errors import CLIENT_GONE, add_handlers
from paceline.serve.metrics import Metrics
from paceline.serve.middleware import Gate, Requests, log_request
from paceline.serve.options import ServeOptions
from paceline.serve.record import RequestRecord
from paceline.serve.service import Service


def make_app(
    service: Service, options: ServeOptions | None = None, metrics: Metrics | None = None
) -> FastAPI:
    """The HTTP API over a running service. With `metrics`, also serves /metrics and the live page."""
    options = options or ServeOptions()
    app = FastAPI(title="paceline", version=__version__, docs_url="/docs", redoc_url=None)
    add_handlers(app)
    for part in (models, completions, chat, responses, tokens):
        app.include_router(part.router(service))
    app.include_router(health.router(service.engine))
    if metrics is not None:
        app.include_router(metrics_page.router(metrics, service.engine))
        app.include_router(live.router())
    add_middleware(app, service, options, metrics)
    return app


def add_middleware(app: FastAPI, service: Service, options: ServeOptions, metrics: Metrics | None) -> None:
    """Wrap the app in middleware. The last one added is the outermost."""
    app.add_middleware(
        Gate,
        engine=service.engine,
        keys=options.api_key,
        share_cache=options.share_cache_across_keys,
        max_body_bytes=options.max_body_bytes,
    )
    if options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "X-Client-Request-Id", "Retry-After"),
        )

    def on_finished(record: RequestRecord) -> None:
        log_request(record)
        if metrics is not None:
            metrics.answered(record.route, record.status or CLIENT_GONE)

    app.add_middleware(Requests, timeout=options.request_timeout, on_finished=on_finished)
