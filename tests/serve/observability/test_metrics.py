"""The counters are the sums of the requests' own metrics."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.backends import fallbacks
from paceline.core.params import SamplingParams
from paceline.core.request import Status
from paceline.core.stats import ControlStats, DraftStats, StepStats
from paceline.engine.engine import Engine
from paceline.serve.observability.metrics import HISTOGRAMS, OTHER, Histogram, Metrics
from paceline.serve.observability.metrics_page import Page, View
from paceline.serve.observability.metrics_vllm import LoraPage
from paceline.serve.routes.models import Models
from paceline.serve.service import Service
from paceline.terminal.flag_groups import SERVER
from tests.serve.running import Client, serving
from tests.toy import ENDLESS, ToyBackend, ToyTokenizer, drain, roomy_engine, toy_engine
from tests.toy_drafter import ScriptedDrafter

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "grafana" / "paceline.json"
PROMPTS = ("one", "two", "three", "four")
LENGTH = 40
# with vLLM's types; `vllm:` there
VLLM_NAMES = {
    "counter": (
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("spec_decode_num_accepted_tokens_per_pos", "num_preemptions", "prefix_cache_hits"),
        *("prefix_cache_queries", "prompt_tokens", "generation_tokens", "request_success"),
    ),
    "histogram": (
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_time_per_output_token_seconds", "request_queue_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
    ),
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
}


def drafting_engine() -> Engine:
    """An engine with a drafter whose drafts are partly right, and shorter at the end."""
    ids = {prompt: tuple(ToyTokenizer().encode(prompt)) for prompt in PROMPTS}
    truth = {}
    for prompt in PROMPTS:
        engine = toy_engine()
        (request,) = engine.add_request(
            ids[prompt], SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        )
        drain(engine)
        truth[ids[prompt]] = request.output_token_ids
    return toy_engine(drafter=ScriptedDrafter(truth, "partly"), budget=5)


def samples(client: Client) -> dict[str, list[tuple[dict[str, str], float]]]:
    """All samples by their name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def total(found: dict[str, list[tuple[dict[str, str], float]]], name: str, **where: str) -> float:
    """The sum of a metric's samples with these labels."""
    return sum(value for labels, value in found[name] if where.items() <= labels.items())


def generate(client: Client, prompt: str, **fields: object) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "max_tokens": LENGTH,
        "temperature": 0,
        "ignore_eos": True,
        "return_metrics": True,
    }
    answer = client.post("/v1/completions", {**body, **fields})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def test_the_counters_are_the_sums_of_the_requests_metrics() -> None:
    with serving(drafting_engine()) as client:
        answers = [
            generate(client, prompt, segment=f"s{number % 2}") for number, prompt in enumerate(PROMPTS)
        ]
        found = samples(client)
    drafts = [answer["metrics"]["speculative_decoding"] for answer in answers]
    for counter, figure in (
        ("spec_decode_num_drafts", "num_spec_steps"),
        ("spec_decode_num_draft_tokens", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        name = f"paceline:{counter}_total"
        assert total(found, name) == sum(draft[figure] for draft in drafts) > 0
        assert total(found, name, segment="s0") == drafts[0][figure] + drafts[2][figure]
        assert total(found, name, drafter="scripted") == total(found, name)
        assert total(found, f"vllm:{counter}_total") == total(found, name)
    assert total(found, "paceline:generation_tokens_total") == 4 * LENGTH
    prompts = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert total(found, "paceline:prompt_tokens_total") == prompts
    assert total(found, "paceline:request_success_total", finished_reason="length") == 4
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_prompt_tokens"):
        assert total(found, f"paceline:{name}_count") == 4
    gaps = total(found, "paceline:inter_token_latency_seconds_count")
    tokens = 4 * LENGTH
    assert gaps == tokens - total(found, "paceline:spec_decode_num_accepted_tokens_total") - 4


def test_positions_are_counted_by_the_drafts_that_reached_them() -> None:
    """Drafts differ in length, so dividing by the number of drafts would be wrong."""
    with serving(drafting_engine()) as client:
        drafts = [generate(client, prompt)["metrics"]["speculative_decoding"] for prompt in PROMPTS]
        found = samples(client)
    histogram = Counter(dict.fromkeys(range(6), 0))
    for draft in drafts:
        histogram.update(dict(enumerate(draft["acceptance_histogram"])))
    tried, accepted = (
        [
            total(found, f"paceline:spec_decode_num_{which}_tokens_per_pos_total", position=str(place))
            for place in range(5)
        ]
        for which in ("draft", "accepted")
    )
    assert accepted == [sum(histogram[count] for count in range(place + 1, 6)) for place in range(5)]
    assert sum(tried) == total(found, "paceline:spec_decode_num_draft_tokens_total")  # these were chains
    assert tried[0] == total(found, "paceline:spec_decode_num_drafts_total")
    assert tried[4] < tried[0]
    assert tried == sorted(tried, reverse=True)
    assert all(hits <= tries for hits, tries in zip(accepted, tried, strict=True))


def test_n_outputs_share_one_prompt_and_end_one_by_one() -> None:
    with serving() as client:
        answer = generate(client, "hello", n=3, max_tokens=5)
        found = samples(client)
    assert total(found, "paceline:prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert total(found, "paceline:generation_tokens_total") == 15
    assert total(found, "paceline:request_success_total", finished_reason="length") == 3
    assert total(found, "paceline:request_prompt_tokens_count") == 1
    assert total(found, "paceline:request_generation_tokens_count") == 3


def test_every_vllm_metric_exists_with_its_type_and_label() -> None:
    with serving(drafting_engine()) as client:
        generate(client, "one")
        text = client.get("/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for kind, names in VLLM_NAMES.items():
        for name in names:
            assert families[f"paceline:{name}"].type == kind
            assert all(
                sample.labels["model_name"] == "toy" for sample in families[f"paceline:{name}"].samples
            )
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6
    assert families["process_start_time_seconds"].samples[0].value > 1e9
    assert families["paceline:server_info"].samples[0].labels["version"] == "test"


def test_vllm_bench_finds_its_four_counters_and_nothing_else() -> None:
    with serving(drafting_engine()) as client:
        generate(client, "one")
        lines = [
            line for line in client.get("/metrics").body.decode().splitlines() if line.startswith("vllm:")
        ]
    names = {line.split("{")[0] for line in lines}
    assert names == {
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    }
    assert all(len(line.split()) == 2 for line in lines)  # vLLM splits at the first space


def test_failures_refusals_and_aborts_are_counted() -> None:
    backend = ToyBackend(max_rows=64)
    with serving(roomy_engine(backend)) as client:
        backend.fail_next = MemoryError("no room")
        assert client.complete().status == 500
        assert client.complete(temperature=-1).status == 400
        assert client.get("/nowhere/at/all").status == 404
        assert client.raw(b"nonsense\r\n\r\n").status == 400
        client.stream(max_tokens=ENDLESS, ignore_eos=True).close()
        found = samples(client)
        while not total(found, "paceline:request_success_total", finished_reason="abort"):
            found = samples(client)
    assert total(found, "paceline:request_success_total", finished_reason="error") == 1
    assert total(found, "paceline:request_success_total", finished_reason="abort") == 1
    assert total(found, "paceline:engine_failed_steps_total") == 1
    http = "paceline:http_requests_total"
    assert total(found, http, path="/v1/completions", status="500") == 1
    assert total(found, http, path="/v1/completions", status="400") == 1
    assert total(found, http, path="", status="404") == 1  # unknown paths are not labels
    assert total(found, http, path="", status="400") == 1
    assert total(found, "paceline:engine_healthy") == 1


def test_kernels_that_a_slower_one_replaces_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallbacks, "_replaced", {})
    fallbacks.record_fallback("many_rows", "Triton's kernels run", OSError("NVRTC is missing"))
    page = Page(View(Metrics("m", 4, {}), StepStats(), healthy=True))
    shown = [own.samples for own in page.collect() if own.name == "paceline:kernel_fallbacks"]
    assert [(sample.labels["kernel"], sample.value) for sample in shown[0]] == [("many_rows", 1.0)]


def test_the_parts_of_a_steps_time_add_up() -> None:
    metrics = Metrics("m", 4, {})
    stats = StepStats(plan_time=1, draft_time=2, build_time=3, forward_time=4, verify_time=5, commit_time=6)
    metrics.step(stats, [])
    metrics.step(stats, [])
    assert sum(metrics.step_seconds.values()) == 2 * stats.total_time
    assert metrics.step_seconds["forward"] == 8
    assert metrics.steps == 2


def drafted(metrics: Metrics, segments: Sequence[str]) -> None:
    for segment in segments:
        metrics.step(StepStats(drafts=(DraftStats("r", segment, "ngram", 3, 2, 1),)), [])


def test_segments_beyond_the_limit_are_counted_together() -> None:
    metrics = Metrics("m", 2, {})
    drafted(metrics, ["a", "", "b", "c", "a", "d", "", "c"])
    assert {
        name: sum(one.drafts for one in counts.drafts.values()) for name, counts in metrics.segments.items()
    } == {
        "": 2,
        "a": 2,
        "b": 1,
        OTHER: 3,
    }


@pytest.mark.parametrize("segment", ['a"b', "a\nb", "a b", "é", "a" * 65, "{}", "a\\"])
def test_a_segment_that_is_no_valid_label_is_refused(segment: str) -> None:
    with serving() as client:
        answer = client.complete(segment=segment)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "segment"
        found = samples(client)
    assert {labels["segment"] for labels, _ in found["paceline:prompt_tokens_total"]} == {""}


def test_the_segment_may_come_from_a_header() -> None:
    with serving() as client:
        answer = client.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, X_Segment="eu/chat-1.5")
        assert answer.status == 200
        assert total(samples(client), "paceline:generation_tokens_total", segment="eu/chat-1.5") == 2
        assert client.post("/v1/completions", {"prompt": "a"}, X_Segment="a b").status == 400


def test_a_histogram_is_what_counting_by_hand_gives() -> None:
    histogram = Histogram((1.0, 2.5, 5.0))
    values = (0.0, 1.0, 1.1, 2.5, 5.0, 5.1, 100.0)
    for value in values:
        histogram.observe(value)
    by_hand = [(str(edge), sum(value <= edge for value in values)) for edge in (1.0, 2.5, 5.0)]
    assert histogram.buckets() == [*by_hand, ("+Inf", len(values))]
    assert histogram.total == sum(values)


def test_bucket_bounds_are_increasing() -> None:
    for edges, _ in HISTOGRAMS.values():
        assert list(edges) == sorted(set(edges))


def test_every_expression_of_the_dashboard_names_metrics_that_exist() -> None:
    with serving(drafting_engine()) as client:
        generate(client, "one", segment="a")
        found = samples(client)
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 15
    for expression in expressions:
        names = re.findall(r"\b(?:paceline:|process_)\w+", expression)
        assert names, expression
        assert set(names) <= set(found), expression
        labels = set(re.findall(r"by \(([\w, ]+)\)", expression))
        wanted = {label.strip() for group in labels for label in group.split(",")} - {"le"}
        assert wanted <= set().union(*(labels for name in names for labels, _ in found[name])), expression


def test_the_documentation_names_every_metric_and_every_flag() -> None:
    text = (DOCS / "guides" / "serve.md").read_text()
    with serving(drafting_engine()) as client:
        generate(client, "one")
        page = client.get("/metrics").body.decode()
    families = {family.name: family.type for family in text_string_to_metric_families(page)}
    for name, kind in families.items():
        if name.startswith("paceline:"):
            assert f"`{name.removeprefix('paceline:')}{'_total' * (kind == 'counter')}`" in text
    for flag in SERVER:
        assert f"`--{flag.name.replace('_', '-')}`" in text


def test_the_controllers_decisions_are_counted():
    engine = toy_engine()
    with serving(engine) as client:
        assert "paceline:control_steps_total" not in samples(client)  # there is nothing to decide
    metrics = Metrics("m", 4, {})
    for reason in ("gain", "gain", "pair"):
        facts = ControlStats(reason, regret=0.5, gain=1.4, poor_segments=frozenset({"poems"}))
        metrics.step(StepStats(control=facts), [])
    pages = {metric.name: metric.samples for metric in Page(View(metrics, StepStats(), True))._decisions()}
    steps = {sample.labels["reason"]: sample.value for sample in pages["paceline:control_steps"]}
    assert steps == {"gain": 2, "pair": 1}
    assert [sample.value for sample in pages["paceline:control_gain"]] == [1.4]
    assert [sample.value for sample in pages["paceline:control_regret_seconds"]] == [0.5]
    assert [sample.labels["segment"] for sample in pages["paceline:control_poor_segment"]] == ["poems"]


def test_with_vllms_prefix_every_name_that_both_have_is_there_with_the_sums() -> None:
    with serving(drafting_engine(), metrics_prefix="vllm") as client:
        for number, prompt in enumerate(PROMPTS):
            generate(client, prompt, segment=f"s{number % 2}")
        text = client.get("/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for kind, names in VLLM_NAMES.items():
        for name in names:
            ours, theirs = families[f"paceline:{name}"], families[f"vllm:{name}"]
            assert theirs.type == kind
            assert sum(one.value for one in theirs.samples) == pytest.approx(
                sum(one.value for one in ours.samples)
            )
            assert all({"segment", "drafter"}.isdisjoint(one.labels) for one in theirs.samples)
            assert len({(one.name, *one.labels.items()) for one in theirs.samples}) == len(theirs.samples)
    (cache,) = families["vllm:cache_config_info"].samples
    assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"]) == ("4", "400")
    (adapters,) = families["vllm:lora_requests_info"].samples
    assert adapters.labels["max_lora"] == "0"


def test_gateways_read_which_adapters_requests_run_with_or_wait_for() -> None:
    requests = [
        SimpleNamespace(adapter="sql", status=Status.RUNNING),
        SimpleNamespace(adapter="sql", status=Status.RUNNING),
        SimpleNamespace(adapter="chat", status=Status.WAITING),
        SimpleNamespace(adapter="", status=Status.WAITING),
    ]
    engines: Any = {"toy": SimpleNamespace(unfinished=requests), "other": SimpleNamespace(unfinished=[])}
    ((sample,),) = [family.samples for family in LoraPage(engines, num_adapters=3).collect()]
    assert sample.labels == {
        "max_lora": "3",
        "running_lora_adapters": "toy:sql",
        "waiting_lora_adapters": "toy:chat",
    }


def test_adapters_are_counted_once_whatever_names_their_model_has() -> None:
    names = ("toy", "also", "toy:sql", "toy:chat", "also:sql", "also:chat")
    engine: Any = object()
    service = Service(engine, ToyTokenizer(), names)  # type: ignore[arg-type]
    assert Models.of(service).num_adapters == 2
