"""The FastAPI app: routes and middleware."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from paceline import __version__
from paceline.serve import (
    chat,
    completions,
    docs_page,
    health,
    live,
    messages,
    metrics_page,
    models,
    responses,
    running,
    tokens,
    unknown_paths,
)
from paceline.serve.errors import CLIENT_GONE, add_handlers
from paceline.serve.head import HeadAsGet
from paceline.serve.metrics import Metrics
from paceline.serve.middleware import Gate, Requests, log_request
from paceline.serve.options import ServeOptions
from paceline.serve.record import RequestRecord
from paceline.serve.service import Service


@dataclass(frozen=True)
class Pages:
    """What a server shows of engines that run elsewhere."""

    metrics: metrics_page.Reader  # for /metrics
    routers: Sequence[APIRouter]  # of further paths


def make_app(
    service: Service,
    options: ServeOptions | None = None,
    metrics: Metrics | None = None,
    on_finished: Sequence[Callable[[RequestRecord], None]] = (),
    pages: Pages | None = None,
) -> FastAPI:
    """The HTTP API over a running service. With `metrics`, also serves /metrics and the live page.

    `on_finished` are called with the record of each finished request, in the event loop. `pages` are those of
    a server whose engine runs elsewhere.
    """
    options = options or ServeOptions()
    app = FastAPI(title="paceline", version=__version__, docs_url=None, redoc_url=None)
    add_handlers(app)
    routers = [part.router(service) for part in (models, completions, chat, responses, messages, tokens)]
    routers += [health.router(service.engine), docs_page.router()]
    if metrics is not None:
        routers += [
            metrics_page.router(pages.metrics if pages else metrics_page.reader(metrics, service.engine)),
            running.router(service.engine),
            live.router(),
            *(pages.routers if pages else ()),
        ]
    for router in routers:
        app.include_router(router)
    unknown_paths.add_handlers(app, routers)
    add_middleware(app, service, options, [log_request, *_counting(metrics), *on_finished])
    return app


def _counting(metrics: Metrics | None) -> Iterator[Callable[[RequestRecord], None]]:
    if metrics is not None:
        yield lambda record: metrics.answered(record.route, record.status or CLIENT_GONE)


def add_middleware(
    app: FastAPI,
    service: Service,
    options: ServeOptions,
    on_finished: Sequence[Callable[[RequestRecord], None]],
) -> None:
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
            expose_headers=("X-Request-Id", "X-Client-Request-Id", "X-Speculative-Fallback", "Retry-After"),
        )
    app.add_middleware(HeadAsGet)
    app.add_middleware(Requests, timeout=options.request_timeout, on_finished=on_finished)
