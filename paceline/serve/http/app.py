"""The FastAPI app: routes and middleware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from paceline import __version__
from paceline.serve.anthropic import messages
from paceline.serve.engines import EngineGroup
from paceline.serve.http import unknown_paths
from paceline.serve.http.errors import CLIENT_GONE, add_handlers
from paceline.serve.http.middleware import Gate, HeadAsGet, Requests, log_request
from paceline.serve.observability import health, learning_page, live, metrics_page, running
from paceline.serve.observability.learning_page import Learning, LearnPage
from paceline.serve.observability.metrics import Metrics
from paceline.serve.observability.record import RequestRecord
from paceline.serve.openai import chat, completions, responses, tokens
from paceline.serve.openai import models as models_endpoint
from paceline.serve.options import ServeOptions
from paceline.serve.routes.metrics import RouteMetrics, RoutePage
from paceline.serve.routes.models import Models
from paceline.serve.service import Service

EXPOSED_HEADERS = (
    "X-Request-Id",
    "X-Client-Request-Id",
    "X-Speculative-Fallback",
    "X-Routed-Model",
    "Retry-After",
)


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
    """The HTTP API over one running service; see make_models_app."""
    return make_models_app(
        Models.of(service),
        options or ServeOptions(),
        () if metrics is None else [metrics],
        on_finished,
        pages,
    )


def make_models_app(
    models: Models,
    options: ServeOptions,
    metrics: Sequence[Metrics] = (),
    on_finished: Sequence[Callable[[RequestRecord], None]] = (),
    pages: Pages | None = None,
    learning: Learning | None = None,
) -> FastAPI:
    """The HTTP API over running models. With `metrics`, one for each engine, also serves /metrics and the
    live page; the first counts HTTP requests.

    `on_finished` are called with the record of each finished request, in the event loop. `pages` are those of
    a server whose engine runs elsewhere, `learning` what one that learns shows of it.
    """
    app = FastAPI(title="paceline", version=__version__, docs_url=None, redoc_url=None)
    add_handlers(app)
    endpoints = (models_endpoint, completions, chat, responses, messages, tokens)
    routers = [endpoint.router(models) for endpoint in endpoints]
    routers += [health.router(models.engines), live.docs_router()]
    counting: list[Callable[[RequestRecord], None]] = []
    if metrics:
        route_metrics = RouteMetrics(models.table)
        route_page, prefix = RoutePage(route_metrics), options.metrics_prefix
        others = [route_page, *([LearnPage(learning)] if learning else ())]
        here = metrics_page.reader(metrics, models.engines.engines, prefix, models.num_adapters)
        read = metrics_page.followed_by(pages.metrics if pages else here, others)
        routers += [
            metrics_page.router(read),
            running.router(models.engines),
            live.router(),
            *([learning_page.router(learning)] if learning else ()),
            *(pages.routers if pages else ()),
        ]
        counting = [partial(_count_answer, metrics[0]), route_metrics.finished]
    for router in routers:
        app.include_router(router)
    unknown_paths.add_handlers(app, routers)
    add_middleware(app, models.engines, options, [log_request, *counting, *on_finished])
    return app


def _count_answer(metrics: Metrics, record: RequestRecord) -> None:
    metrics.answered(record.route, record.status or CLIENT_GONE)


def add_middleware(
    app: FastAPI,
    engines: EngineGroup,
    options: ServeOptions,
    on_finished: Sequence[Callable[[RequestRecord], None]],
) -> None:
    """Wrap the app in middleware. The last one added is the outermost."""
    app.add_middleware(
        Gate,
        engine=engines,
        keys=options.api_key,
        separate_keys=options.separates_keys,
        max_body_bytes=options.max_body_bytes,
    )
    if options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(HeadAsGet)
    app.add_middleware(Requests, timeout=options.request_timeout, on_finished=on_finished)
