"""After a pass that raised or gave NaN, every request outside of it gets the bytes of an undisturbed run.

A pass that is lost leaves rubbish, or NaN, where it should have written keys and values, as a device would
that stopped half way. No request that succeeds has read any of it, and none of it stays in the prefix cache.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.controller import FixedController
from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.trees import DraftPlan
from paceline.engine.engine import Engine
from tests.engine.mixed_requests import REQUESTS, Changing, Hosted, LookedUp, expected, outcome
from tests.toy import ToyBackend, ToyPool, drain, play, toy_engine
from tests.toy_drafter import ScriptedDrafter

RUBBISH = -555  # of a pass that raised: a request that reads it gets other bytes
NAN = -666  # in keys and values: a request that reads it gets NaN


class Disturbed(ToyBackend):
    """Loses the next pass: it raises, or gives NaN to all or to the last of its requests."""

    lose_next: str | None = None
    lost = 0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        output = super().forward(batch)
        how, self.lose_next = self.lose_next, None
        if how is None:
            return output
        self.lost += 1
        first = batch.num_requests - 1 if how == "nan for one" else 0
        for request in range(first, batch.num_requests):
            self._spoil(batch, request, RUBBISH if how == "raise" else NAN)
        if how == "raise":
            raise RuntimeError("the device stopped")
        spoiled = batch.row_offsets[first]
        output.logits[batch.logit_rows >= spoiled] = np.nan
        if output.chosen is not None and batch.choices is not None:
            output.chosen[batch.choices.rows >= spoiled] = -1
        return output

    def _spoil(self, batch: ForwardBatch, request: int, token: int) -> None:
        pool, context = batch.pool, int(batch.context_lengths[request])
        assert isinstance(pool, ToyPool)
        for index in range(context, context + int(np.diff(batch.row_offsets)[request])):
            page = batch.page_tables[request, index // self.page_size]
            pool.tokens[page * self.page_size + index % self.page_size] = token


DRAFTS = {
    "plain": None,
    "tree": (ScriptedDrafter, "tree", [4]),
    "chain": (ScriptedDrafter, "partly", [3]),
    "changing": (Hosted, "partly", [0, 3, 2]),
    "looked up": (LookedUp, "", [3]),
}


def disturbed_engine(
    on_device: bool, drafts: str, caching: bool = True, rows: int = 16
) -> tuple[Engine, Disturbed]:
    backend = Disturbed(on_device=on_device, max_rows=rows, nan_after=NAN)
    drafter, controller = None, None
    if (given := DRAFTS[drafts]) is not None:
        kind, style, lengths = given
        truth = {tuple(ids): expected(number)[0] for number, (ids, _) in enumerate(REQUESTS)}
        drafter = kind(truth, style)
        controller = Changing(lengths, 2)
        if style == "tree":
            controller = FixedController(DraftPlan("scripted", 4, 2))
    engine = toy_engine(
        backend,
        num_pages=100,
        max_model_len=48,
        max_num_seqs=4,
        max_num_batched_tokens=rows,
        enable_prefix_caching=caching,
        drafter=drafter,
        controller=controller,
    )
    return engine, backend


def finish_and_judge(engine: Engine, added: list) -> None:
    """Survivors have their own bytes, no page is held, and the next request is served."""
    drain(engine)
    for request, number in added:
        if request.finish_reason not in ("error", "abort"):
            assert outcome(request) == expected(number)
        else:
            assert request.output_token_ids == expected(number)[0][: request.num_output]
    assert engine.kv.usage == 0
    again = dict.fromkeys([number for _, number in added][-5:])  # they would find pages of the earlier ones
    later = [(engine.add_request(*REQUESTS[number])[0], number) for number in again]
    drain(engine)
    for request, number in later:
        assert outcome(request) == expected(number)
    assert engine.kv.usage == 0


LOSSES = ["raise", "nan for all", "nan for one"]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(REQUESTS) - 1)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("lose"), st.sampled_from(LOSSES)),
        st.tuples(st.just("abort"), st.integers(0, 10)),
    ),
    max_size=25,
)


@settings(max_examples=15, deadline=None)
@given(EVENTS, st.booleans(), st.sampled_from(sorted(DRAFTS)), st.booleans())
def test_survivors_have_the_bytes_of_an_undisturbed_run(events, on_device, drafts, caching):
    engine, backend = disturbed_engine(on_device, drafts, caching)
    added = play(engine, events, REQUESTS, lambda how: setattr(backend, "lose_next", how))
    backend.lose_next = None
    finish_and_judge(engine, added)


@pytest.mark.parametrize("drafts", ["plain", "tree", "changing"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("how", "steps"), list(zip(LOSSES * 2, [0, 1, 5, 5, 0, 1], strict=True)))
def test_requests_outside_a_failed_pass_continue(how, steps, drafts, on_device):
    """Steps before the loss: 0 and 1 are chunks of prompts, 5 is decoding."""
    engine, backend = disturbed_engine(on_device, drafts)
    added = [(engine.add_request(*REQUESTS[number])[0], number) for number in (3, 7, 10, 2, 6)]
    for _ in range(steps):
        engine.step()
    backend.lose_next = how
    finish_and_judge(engine, added)
    assert backend.lost == 1
    failed = [request for request, _ in added if request.finish_reason == "error"]
    assert 1 <= len(failed) < len(added)
    assert len(failed) == 1 or how != "nan for one"
