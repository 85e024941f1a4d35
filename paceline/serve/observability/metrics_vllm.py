"""Metrics under vLLM's names, for what reads vLLM: `vllm bench serve`, gateways, autoscalers, dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.request import Status
from paceline.engine.frontend.client import EngineClient
from paceline.serve.observability.metrics import HISTOGRAMS

PREFIX = "paceline:"
VLLM = "vllm:"
OWN_LABELS = ("segment", "drafter")  # vLLM does not tell these apart

# `vllm bench serve` reads these before and after its run, so they are there before the first draft.
# Not the drafts by position: vLLM has no such counter, and its bench would count them as draft tokens too.
_FROM_ZERO = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
VLLM_BENCH_NAMES = frozenset({*_FROM_ZERO, "spec_decode_num_accepted_tokens_per_pos"})
# and with `--metrics-prefix vllm` all that both have
VLLM_NAMES = VLLM_BENCH_NAMES | {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    *HISTOGRAMS,
}


def vllm_alias(family: Metric, model_name: str) -> Metric:
    """A family of ours under vLLM's name and with its labels: segments and drafters are added up."""
    name = family.name.removeprefix(PREFIX)
    alias = Metric(VLLM + name, family.documentation, family.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        labels = tuple(item for item in sample.labels.items() if item[0] not in OWN_LABELS)
        key = (VLLM + sample.name.removeprefix(PREFIX), labels)
        sums[key] = sums.get(key, 0.0) + sample.value
    if not sums and name in _FROM_ZERO:
        sums[f"{VLLM}{name}_total", (("model_name", model_name),)] = 0.0
    for (sample_name, labels), value in sums.items():
        alias.add_sample(sample_name, dict(labels), value)
    return alias


class LoraPage(Collector):
    """The LoRA adapters of running and of waiting requests, as clients name them: gateways read these."""

    def __init__(self, engines: Mapping[str, EngineClient], num_adapters: int) -> None:
        """`engines` by the names of their models; `num_adapters` are served."""
        self._engines, self._num_adapters = engines, num_adapters

    def collect(self) -> Iterator[Metric]:
        name = VLLM + "lora_requests_info"
        family = GaugeMetricFamily(
            name, "1; the labels name the LoRA adapters of running and waiting requests."
        )
        labels = {"max_lora": str(self._num_adapters)}
        for status in (Status.RUNNING, Status.WAITING):
            labels[f"{status.value}_lora_adapters"] = ",".join(self._adapters(status))
        family.add_sample(name, labels, 1.0)
        yield family

    def _adapters(self, status: Status) -> list[str]:
        found = {
            f"{model}:{request.adapter}"
            for model, engine in self._engines.items()
            for request in engine.unfinished
            if request.adapter and request.status is status
        }
        return sorted(found)
