"""Methods that are loaded when a request first asks for them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.request import Request
from paceline.core.trees import DraftPlan
from paceline.draft.base import Drafter
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.lookup.suffix import SuffixDrafter, SuffixOptions
from paceline.draft.on_demand import OnDemandDrafter
from paceline.engine.admission import Limits
from tests.draft.requests import chains, make_request
from tests.engines import new_engine
from tests.models.model_files import config_of, random_tensors, write_gguf
from tests.toy import VOCAB, ToyBackend, ToyTokenizer, drain

REPEATING = [5, 6, 7, 8] * 4
PLAN = DraftPlan("ngram", 4)
LONG = 60.0  # seconds: longer than any load


def ngram(longest: int = 4) -> NgramDrafter:
    return NgramDrafter.load(NgramDrafter.Options(longest), None)  # type: ignore[arg-type]


def test_it_is_loaded_once_and_drafts_as_the_method_itself() -> None:
    loads: list[Drafter] = []

    def load() -> Drafter:
        loads.append(ngram())
        return loads[-1]

    drafter = OnDemandDrafter("ngram", load)
    request = make_request(REPEATING)
    drafter.forget(request)
    assert not loads  # nothing before a request asks
    first = drafter.propose([request], [PLAN])
    assert chains(first) == chains(ngram().propose([request], [PLAN])) == [[5, 6, 7, 8]]
    drafter.propose([request], [PLAN])
    assert len(loads) == 1
    assert drafter.follows_prefix


def test_while_it_is_being_loaded_nothing_is_drafted_and_nobody_waits() -> None:
    may_load = threading.Event()

    def load() -> Drafter:
        assert may_load.wait(LONG)
        return ngram()

    drafter, request = OnDemandDrafter("ngram", load), make_request(REPEATING)
    drafter.max_wait = 0.0
    for _ in range(2):
        assert chains(drafter.propose([request], [PLAN])) == [[]]
    may_load.set()
    end = time.monotonic() + LONG
    while chains(drafter.propose([request], [PLAN])) != [[5, 6, 7, 8]]:
        assert time.monotonic() < end, "it was never loaded"


def test_a_method_that_cannot_be_loaded_raises_where_it_is_asked() -> None:
    def load() -> Drafter:
        raise OSError("no compiler")

    drafter = OnDemandDrafter("ngram", load)
    for _ in range(2):  # the engine catches it, and its requests decode plainly
        with pytest.raises(OSError, match="no compiler"):
            drafter.propose([make_request(REPEATING)], [PLAN])


def test_responses_are_kept_of_the_requests_that_asked_and_of_no_others() -> None:
    drafter = OnDemandDrafter("suffix", lambda: SuffixDrafter(SuffixOptions()))
    asked, other = make_request([1, 2, 3], [10, 11, 12, 13]), make_request([1, 2, 3], [20, 21, 22, 23])
    plan = DraftPlan("suffix", 1)
    drafter.propose([asked], [plan])
    for request in (asked, other):
        drafter.forget(request)
    later = [make_request([9, 10, 11]), make_request([9, 20, 21])]
    assert chains(drafter.propose(later, [plan, plan])) == [[12], []]


def test_beside_device_passes_it_drafts_on_the_host_and_the_bytes_stay() -> None:
    def run(drafters: dict[str, Drafter], asked: str) -> list[Request]:
        engine = new_engine(
            ToyBackend(on_device=True),
            ToyTokenizer(),
            Limits(VOCAB, 128, 4, 32),
            num_pages=120,
            drafters=drafters,
            plans={name: DraftPlan(name, 4) for name in drafters},
        )
        requests = []
        for index in range(4):  # every other one decodes on the device until one that asks joins it
            own = {"speculative": asked} if index % 2 else {}
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **own)
            requests += engine.add_request(REPEATING[index:], params)
            engine.step()
        drain(engine)
        return requests

    drafted = run({"ngram": OnDemandDrafter("ngram", lambda: ngram(longest=1))}, "ngram")
    plain = run({}, "off")
    assert [request.output_token_ids for request in drafted] == [one.output_token_ids for one in plain]
    assert [bool(request.speculative.num_draft_tokens) for request in drafted] == [False, True, False, True]
    assert not any(request.failed_drafters for request in drafted)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_gguf(folder / "tiny.gguf", "llama", random_tensors(config_of("llama")))


@pytest.fixture(autouse=True)
def loaded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than a second to load kernels: wait for them."""
    monkeypatch.setattr(OnDemandDrafter, "max_wait", LONG)


@pytest.mark.parametrize("config", ["off", None, "auto"])
def test_every_engine_drafts_by_ngram_and_suffix_for_requests_that_name_them(path: Path, config: Any) -> None:
    llm = LLM(str(path), threads=1, backend="cpu", speculative_config=config)
    # the same token again and again, so that there is something to copy
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logit_bias": {5: 100}}
    asked = ["off", "ngram", {"method": "suffix", "num_speculative_tokens": 3}, None]
    many = [SamplingParams(**options, speculative=speculative) for speculative in asked]
    outputs = llm.generate([[5, 6, 7, 8] * 4] * 4, many)
    metrics = [output.metrics.speculative for output in outputs]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert metrics[0].num_draft_tokens == 0
    assert metrics[1].num_accepted_draft_tokens > 0
    assert metrics[2].num_accepted_draft_tokens > 0
    assert len(metrics[1].drafts_per_position) == 6  # ngram's default
    assert len(metrics[2].drafts_per_position) == 3
    assert all(one.unavailable_drafter is None and not one.failed_drafters for one in metrics)
    if config != "auto":
        assert metrics[3].num_draft_tokens == 0  # the default stays what it was
    llm.close()


def test_a_small_pass_gets_a_short_default_draft(path: Path) -> None:
    llm = LLM(str(path), threads=1, speculative_config="off", max_num_seqs=2, max_num_batched_tokens=4)
    (output,) = llm.generate([5, 6, 7, 8] * 4, SamplingParams(max_tokens=4, speculative="ngram"))
    assert output.outputs[0].finish_reason in ("length", "stop")
    llm.close()
