"""Metrics by route: answering models, what was escalated, how long it took, and the tokens of all
attempts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.engine.outputs import RequestOutput
from paceline.serve.observability.metrics import HISTOGRAMS, Histogram
from paceline.serve.observability.record import RequestRecord
from paceline.serve.routes.file import RouteTable
from paceline.serve.routes.trail import Visit

PREFIX = "paceline:route_"
_LATENCY_EDGES = HISTOGRAMS["e2e_request_latency_seconds"][0]


class RouteMetrics:
    """Counts finished requests by the virtual models that they went through. Used by the event loop only."""

    def __init__(self, table: RouteTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # every route is there from the beginning, so that a share of 0 is a number and not a gap
        pairs = [(name, model) for name in table.routes for model in table.reachable(name)]
        self.requests: Counter[tuple[str, str]] = Counter(dict.fromkeys(pairs, 0))
        self.prompt_tokens: Counter[tuple[str, str]] = Counter(dict.fromkeys(pairs, 0))
        self.generation_tokens: Counter[tuple[str, str]] = Counter(dict.fromkeys(pairs, 0))
        self.escalations: Counter[str] = Counter(dict.fromkeys(table.routes, 0))
        self.fallbacks: Counter[str] = Counter(dict.fromkeys(table.routes, 0))
        self.latency = {name: Histogram(_LATENCY_EDGES) for name in table.routes}

    def finished(self, record: RequestRecord) -> None:
        """Count a finished HTTP request, if a route led it to a model."""
        for visit in record.trail.visits if record.trail is not None else ():
            self._count(visit, self._clock() - record.begun)

    def _count(self, visit: Visit, seconds: float) -> None:
        self.escalations[visit.route] += visit.escalations
        self.fallbacks[visit.route] += visit.fallbacks
        for model, generation in visit.attempts:
            pair = visit.route, model
            for output in generation.outputs_with_logprobs:
                self.prompt_tokens[pair] += len(output.prompt_token_ids)
                self.generation_tokens[pair] += _num_tokens(output)
        if visit.attempts:
            answered_by, _ = visit.attempts[-1]
            self.requests[visit.route, answered_by] += 1
            self.latency[visit.route].observe(seconds)


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)


class RoutePage(Collector):
    """The metrics by route for Prometheus; nothing without routes."""

    def __init__(self, metrics: RouteMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        if not metrics.latency:
            return
        by_model = {
            "requests": ("Requests, by the model whose answer was sent.", metrics.requests),
            "prompt_tokens": ("Prompt tokens of all attempts, sent or not.", metrics.prompt_tokens),
            "generation_tokens": ("Tokens of all attempts, sent or not.", metrics.generation_tokens),
        }
        for name, (words, pairs) in by_model.items():
            yield _counter(name, words, ["route", "model_name"], pairs.items())
        escalated = [((route,), count) for route, count in metrics.escalations.items()]
        yield _counter("escalations", "Answers of a cascade that were not sent.", ["route"], escalated)
        passed = [((route,), count) for route, count in metrics.fallbacks.items()]
        yield _counter("fallbacks", "Models of a fallback that had no room.", ["route"], passed)
        words = "From arrival to the last byte, all attempts included."
        family = HistogramMetricFamily(PREFIX + "latency_seconds", words, labels=["route"])
        for route, histogram in metrics.latency.items():
            family.add_metric([route], histogram.buckets(), histogram.total)
        yield family


def _counter(
    name: str, words: str, labels: list[str], counts: Iterable[tuple[tuple[str, ...], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, words, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family
