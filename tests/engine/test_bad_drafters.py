"""Drafters are plug-ins: one that raises, returns invalid drafts or hangs costs time, and never a byte."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import DrafterNeeds
from paceline.draft.device import TextDrafts
from paceline.engine.frontend.async_engine import AsyncEngine
from tests.engine.frontend.test_async_engine import text_of
from tests.serve.running import Gate, serving, until
from tests.toy import VOCAB, ToyBackend, ToyTokenizer, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

PROMPTS = [[5, 6, 7], [8, 9], [10] * 9]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def outputs(drafter: ScriptedDrafter | None = None, on_device: bool = False) -> list[Request]:
    engine = toy_engine(
        ToyBackend(on_device=on_device), drafter=drafter, budget=4 if drafter else 0, branching=1
    )
    requests = [engine.add_request(ids, PARAMS)[0] for ids in PROMPTS]
    drain(engine)
    assert engine.kv.usage == 0
    return requests


@pytest.fixture(scope="module")
def truth() -> dict[tuple[int, ...], list[int]]:
    return {tuple(request.prompt_token_ids): request.output_token_ids for request in outputs()}


def array(*values: float, kind: type = np.int32) -> np.ndarray:
    return np.array(values, dtype=kind)


# what a drafter gives for three requests, each of which may have 4 nodes of a chain
NONSENSE: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "text": lambda: "tokens",
    "a token outside the vocabulary": lambda: DraftTrees.chains([[VOCAB]] * 3),
    "a token below 0": lambda: DraftTrees.chains([[-1]] * 3),
    "too few trees": lambda: DraftTrees.chains([[5]] * 2),
    "over budget": lambda: DraftTrees.chains([[5] * 99] * 3),
    "a cycle": lambda: DraftTrees(array(5, 6), array(1, 0), array(0, 2, 2, 2)),
    "its own parent": lambda: DraftTrees(array(5), array(0), array(0, 1, 1, 1)),
    "a branch in a chain": lambda: DraftTrees(array(5, 6), array(-1, -1), array(0, 2, 2, 2)),
    "more parents than nodes": lambda: DraftTrees(array(5), array(-1, 0), array(0, 1, 1, 1)),
    "offsets beyond the nodes": lambda: DraftTrees(array(5, 6), array(-1, 0), array(0, 4, 2, 2)),
    "offsets that begin late": lambda: DraftTrees(array(5, 6), array(-1, 0), array(1, 2, 2, 2)),
    "chances above 1": lambda: DraftTrees(
        array(5), array(-1), array(0, 1, 1, 1), chances=array(7.0, kind=np.float32)
    ),
    "chances without an end": lambda: DraftTrees(
        array(5), array(-1), array(0, 1, 1, 1), chances=array(np.inf, kind=np.float32)
    ),
    "more chances than nodes": lambda: DraftTrees(
        array(5), array(-1), array(0, 1, 1, 1), chances=array(0.5, 0.5, kind=np.float32)
    ),
    "tokens that are no numbers": lambda: DraftTrees(
        array(np.nan, kind=np.float64), array(-1), array(0, 1, 1, 1)
    ),
    "a table of tokens": lambda: DraftTrees(array(5).reshape(1, 1), array(-1), array(0, 1, 1, 1)),
}


class Nonsense(ScriptedDrafter):
    """Always proposes the same. It reads no features, so passes may overlap with it."""

    needs = DrafterNeeds()
    device = TextDrafts()

    def __init__(self, given: Callable[[], object]) -> None:
        super().__init__({}, "right")
        self.given = given

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        return self.given()  # type: ignore[return-value]

    def observe(self, *_: object) -> None:
        return


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("given", NONSENSE)
def test_requests_with_an_invalid_draft_are_decoded_plainly(truth, caplog, given, on_device):
    requests = outputs(Nonsense(NONSENSE[given]), on_device)
    assert [request.output_token_ids for request in requests] == list(truth.values())
    assert all(request.failed_drafters == {"scripted"} for request in requests)
    assert "drafter scripted failed, its requests continue without it" in caplog.messages[0]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_nan_chances_mean_unknown(truth, on_device):
    def sure_of_nothing() -> DraftTrees:
        return DraftTrees(array(5), array(-1), array(0, 1, 1, 1), chances=array(np.nan, kind=np.float32))

    requests = outputs(Nonsense(sure_of_nothing), on_device)
    assert [request.output_token_ids for request in requests] == list(truth.values())


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("method", ["propose", "observe", "forget", "attach", "detach", "prefill_ahead"])
def test_requests_whose_drafter_raises_are_decoded_plainly(truth, method, on_device):
    class Raises(ScriptedDrafter):
        pass

    def raises(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug in a plug-in")

    setattr(Raises, method, raises)
    requests = outputs(Raises(truth, "right"), on_device)
    assert [request.output_token_ids for request in requests] == list(truth.values())


class Hangs(Nonsense):
    """Hangs until a test releases it."""

    def __init__(self) -> None:
        super().__init__(lambda: DraftTrees.chains([[5]]))
        self.let_go, self.hung = threading.Event(), threading.Event()

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        self.hung.set()
        self.let_go.wait(60)
        return super().propose(requests, plans)


def test_a_hanging_drafter_is_logged_and_its_request_continues_afterwards(caplog):
    drafter = Hangs()
    engine = toy_engine(drafter=drafter, budget=4, branching=1)

    async def work() -> str:
        front = AsyncEngine(engine, ToyTokenizer(), max_queue=9, stuck_after=0.05)
        front.start()
        stream = await front.submit(PROMPTS[0], PARAMS, "r")
        while not caplog.records:
            await asyncio.sleep(0.005)
        assert front.stuck
        drafter.let_go.set()
        text = await text_of(stream)
        while front.stuck or len(caplog.records) < 2:
            await asyncio.sleep(0.005)
        await front.stop()
        return text

    with caplog.at_level(logging.WARNING):
        text = asyncio.run(asyncio.wait_for(work(), 60))
    stuck, recovered = caplog.messages
    assert "ended no step for more than 0.05 seconds. It waits for the drafter scripted." in stuck
    assert "self.let_go.wait(60)" in stuck  # the stack
    assert recovered == "the engine has finished a step and is no longer stuck"
    assert text == outputs()[0].detokenizer.text


def test_an_engine_without_work_is_never_stuck():
    async def work() -> None:
        front = AsyncEngine(toy_engine(), ToyTokenizer(), max_queue=9, stuck_after=0.01)
        front.start()
        stream = await front.submit(PROMPTS[0], PARAMS, "r")
        await text_of(stream)
        await asyncio.sleep(0.05)  # five times as long as a step may take
        assert front.failure is None
        await front.stop()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_health_reports_that_the_engine_is_stuck_and_that_it_continues():
    backend = Gate()
    with serving(toy_engine(backend), stuck_timeout=0.05) as client:
        expected = client.complete(max_tokens=4, temperature=0).json["choices"]
        backend.open.clear()
        with client.connect() as connection:
            body = {"prompt": "hello", "max_tokens": 4}
            connection.sendall(client.request("POST", "/v1/completions", body))
            until(lambda: client.get("/health").json == {"status": "stuck"})
            assert client.get("/health").status == 503
            late = client.complete()
            assert late.status == 503
            assert "restart the server" in late.message
            assert b'paceline:engine_healthy{model_name="toy"} 0.0' in client.get("/metrics").body
            backend.open.set()
            until(lambda: client.get("/health").status == 200)
        assert client.complete(max_tokens=4, temperature=0).json["choices"] == expected
