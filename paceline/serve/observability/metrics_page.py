"""`/metrics`: the counters of metrics.py in Prometheus' text format."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from paceline.backends.fallbacks import fallbacks
from paceline.core.stats import StepStats
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.engine.frontend.client import EngineClient
from paceline.kv.cache import KVCache
from paceline.serve.observability.metrics import HISTOGRAMS, Metrics
from paceline.serve.observability.metrics_vllm import (
    PREFIX,
    VLLM_BENCH_NAMES,
    VLLM_NAMES,
    LoraPage,
    vllm_alias,
)

Labels = dict[str, str]
Samples = Iterable[tuple[Labels, float]]
Reader: TypeAlias = Callable[[], Awaitable[Sequence[Collector]]]  # the pages of metrics, as they are now


@dataclass(frozen=True)
class View:
    """What a page shows of one engine."""

    metrics: Metrics
    state: StepStats  # of the engine, now
    healthy: bool
    labels: Labels = field(default_factory=dict)  # of all samples
    cache: KVCache | None = None  # of an engine in this process


def reader(
    metrics: Sequence[Metrics], engines: Sequence[EngineClient], prefix: str, num_adapters: int = 0
) -> Reader:
    """Reads the metrics of models, each with its engine. `prefix`: as in ServeOptions."""

    async def read() -> Sequence[Collector]:
        pages: list[Collector] = [
            Page(
                View(
                    counted,
                    engine.state,
                    engine.failure is None,
                    cache=engine.kv if isinstance(engine, AsyncEngine) else None,
                ),
                prefix,
            )
            for counted, engine in zip(metrics, engines, strict=True)
        ]
        if prefix == "vllm":
            names = [counted.model_name for counted in metrics]
            pages.append(LoraPage(dict(zip(names, engines, strict=True)), num_adapters))
        return pages

    return read


def followed_by(read: Reader, others: Sequence[Collector]) -> Reader:
    """Reads other pages too."""

    async def read_all() -> Sequence[Collector]:
        return [*await read(), *others]

    return read_all


def render(pages: Sequence[Collector], with_process: bool = True) -> Response:
    """The text of pages; samples of one metric come together."""
    registry = CollectorRegistry()
    registry.register(MergedPages(pages))
    if with_process:
        ProcessCollector(registry=registry)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def router(read: Reader) -> APIRouter:
    """The route of the metrics."""
    routes = APIRouter(tags=["Server"])

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def page() -> Response:
        """What the server did, for Prometheus."""
        return await asyncio.to_thread(render, await read())

    return routes


class MergedPages(Collector):
    """The metrics of several pages. Those of one name are one family: Prometheus refuses a second."""

    def __init__(self, pages: Sequence[Collector]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for page in self._pages:
            for family in page.collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()


class Page(Collector):
    """All metrics of one engine. `prefix`: as in ServeOptions."""

    def __init__(self, view: View, prefix: str = "paceline") -> None:
        self._view = view
        self._metrics = view.metrics
        self._all_vllm_names = prefix == "vllm"

    def collect(self) -> Iterator[Metric]:
        for family in self._with_aliases():
            family.samples = [
                sample._replace(labels={**sample.labels, **self._view.labels}) for sample in family.samples
            ]
            yield family

    def _with_aliases(self) -> Iterator[Metric]:
        aliases = VLLM_NAMES if self._all_vllm_names else VLLM_BENCH_NAMES
        for family in self._families():
            yield family
            if family.name.removeprefix(PREFIX) in aliases:
                yield vllm_alias(family, self._metrics.model_name)

    def _families(self) -> Iterator[Metric]:
        yield InfoMetricFamily(PREFIX + "server", "What is served, and how.", value=dict(self._metrics.info))
        yield from self._state()
        yield from self._steps()
        yield from self._segments()
        yield from self._drafts()
        yield from self._decisions()
        http = [
            ({"path": path, "status": str(status)}, count)
            for (path, status), count in list(self._metrics.http.items())
        ]
        yield self._counter("http_requests", "HTTP requests, by the path and the status of the answer.", http)

    def _state(self) -> Iterator[Metric]:
        """The engine's current state."""
        state = self._view.state
        gauges = {
            "num_requests_running": ("Outputs that take part in passes.", state.running),
            "num_requests_waiting": ("Outputs that wait for their first pass.", state.waiting),
            "kv_cache_usage_perc": ("Share of pages that requests hold; 1 is all.", state.kv_usage),
            "engine_healthy": ("1 while the engine is well.", float(self._view.healthy)),
        }
        for name, (words, value) in gauges.items():
            yield self._gauge(name, words, [({}, value)])
        slower = [({"kernel": name}, 1.0) for name in fallbacks()]
        words = "1 for each GPU kernel that failed to compile: a slower one runs instead."
        yield self._gauge("kernel_fallbacks", words, slower)
        if (kv := self._view.cache) is not None:
            config = {
                "block_size": str(kv.page_size),
                "num_gpu_blocks": str(kv.pages.num_pages),
                "enable_prefix_caching": str(kv.enable_prefix_caching),
            }
            yield self._gauge("cache_config_info", "1; the labels describe the KV cache.", [(config, 1.0)])
        words = "Prompt tokens looked up in the prefix cache."
        yield self._counter("prefix_cache_queries", words, [({}, state.prefix_queries)])
        words = "Prompt tokens found in the prefix cache."
        yield self._counter("prefix_cache_hits", words, [({}, state.prefix_hits)])

    def _steps(self) -> Iterator[Metric]:
        """Passes, and how their time was spent."""
        metrics = self._metrics
        counts = {
            "engine_steps": ("Passes over the model.", metrics.steps),
            "engine_failed_steps": ("Passes that raised; their requests have failed.", metrics.failed_steps),
            "engine_rows": ("Rows of all passes: prompts, tokens and drafts.", metrics.rows),
            "num_preemptions": (
                "Requests that gave up their pages and continued later.",
                metrics.preemptions,
            ),
            "draft_failures": ("Calls of drafters that raised.", metrics.draft_failures),
        }
        for name, (words, count) in counts.items():
            yield self._counter(name, words, [({}, count)])
        parts = [({"part": part}, seconds) for part, seconds in metrics.step_seconds.items()]
        yield self._counter("engine_step_seconds", "Seconds of all steps, by part.", parts)

    def _segments(self) -> Iterator[Metric]:
        """Requests and tokens by segment."""
        segments = list(self._metrics.segments.items())
        sums = [({"segment": name}, counts.prompt_tokens) for name, counts in segments]
        yield self._counter("prompt_tokens", "Tokens of prompts; n outputs share one.", sums)
        sums = [({"segment": name}, counts.generation_tokens) for name, counts in segments]
        yield self._counter("generation_tokens", "Tokens that were generated.", sums)
        ends = [
            ({"segment": name, "finished_reason": reason}, count)
            for name, counts in segments
            for reason, count in list(counts.ended.items())
        ]
        yield self._counter("request_success", "Outputs that have ended, by reason.", ends)
        for name, (_, words) in HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, words, labels=["model_name", "segment"])
            for segment, counts in segments:
                histogram = counts.histograms[name]
                family.add_metric([self._metrics.model_name, segment], histogram.buckets(), histogram.total)
            yield family

    def _drafts(self) -> Iterator[Metric]:
        """Drafts by segment, drafter and position."""
        counts = [
            ({"segment": name, "drafter": drafter}, drafts)
            for name, segment in list(self._metrics.segments.items())
            for drafter, drafts in list(segment.drafts.items())
        ]
        for name, part, words in (
            ("drafts", "drafts", "Drafts."),
            ("draft_tokens", "tokens", "Drafted tokens."),
            ("accepted_tokens", "accepted", "Drafted tokens that were accepted."),
            ("forced_tokens", "forced", "Drafted tokens that a grammar forces: no drafter guessed them."),
            ("accepted_forced_tokens", "accepted_forced", "Forced tokens that were accepted."),
        ):
            samples = [(labels, getattr(drafts, part)) for labels, drafts in counts]
            yield self._counter(f"spec_decode_num_{name}", words, samples)
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted at this position; 0 is the first.",
            [sample for labels, drafts in counts for sample in _per_position(labels, drafts.accepted_at())],
        )
        yield self._counter(
            "spec_decode_num_draft_tokens_per_pos",
            "Drafts that went to this position.",
            [sample for labels, drafts in counts for sample in _per_position(labels, drafts.tried_at())],
        )

    def _decisions(self) -> Iterator[Metric]:
        """The controller's decisions, if it has made any."""
        control = self._metrics.control
        if control is None:
            return
        reasons = [({"reason": reason}, count) for reason, count in dict(self._metrics.decisions).items()]
        yield self._counter("control_steps", "Steps, by why they were planned as they were.", reasons)
        words = "Seconds spent on trying drafts that did not pay."
        yield self._counter("control_regret_seconds", words, [({}, max(0.0, control.regret))])
        words = "Speedup by drafts, measured under the load of the last step; none until it was measured."
        yield self._gauge("control_gain", words, [] if control.gain is None else [({}, control.gain)])
        poor = [({"segment": segment}, 1.0) for segment in sorted(control.poor_segments)]
        yield self._gauge("control_poor_segment", "1 for segments that gain little from drafts.", poor)

    def _gauge(self, name: str, words: str, samples: Samples) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, words)
        for labels, value in samples:
            family.add_sample(PREFIX + name, {"model_name": self._metrics.model_name, **labels}, value)
        return family

    def _counter(self, name: str, words: str, samples: Samples) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, words)
        for labels, value in samples:
            family.add_sample(
                f"{PREFIX}{name}_total", {"model_name": self._metrics.model_name, **labels}, value
            )
        return family


def _per_position(labels: Labels, counts: list[int]) -> Samples:
    return [({**labels, "position": str(position)}, count) for position, count in enumerate(counts)]
