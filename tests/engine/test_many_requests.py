"""Nothing grows with the number of requests ever served.

`python -m benchmarks load --duration` tries that for real. Here a hundred requests fill every bounded thing
to its bound, and as many more make nothing longer.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest

from paceline.control import segments
from paceline.control.acceptance import drafter as drafter_acceptance
from paceline.control.auto import AutoController
from paceline.control.config import CONFIG, AcceptanceConfig, SegmentConfig
from paceline.control.cost import StepCosts
from paceline.control.cost import model as cost_model
from paceline.core.params import SamplingParams
from paceline.core.trees import DraftPlan
from paceline.draft.lookup.suffix import SuffixDrafter
from paceline.engine.engine import Engine
from tests.growth import grown, lengths
from tests.toy import VOCAB, ToyBackend, toy_engine

SEGMENTS = 10


def serve(engine: Engine, first: int, count: int) -> None:
    """Requests of every kind: with stops, salts, segments of their own, without drafts, aborted."""
    rng = random.Random(first)
    for number in range(first, first + count):
        ids = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
        params = SamplingParams(
            temperature=number % 2 * 0.8,
            seed=number,
            max_tokens=1 + number % 6,
            stop=["zz"] if number % 5 == 0 else None,
            speculative="off" if number % 7 == 0 else None,
        )
        salt = f"user {number}" if number % 3 == 0 else ""
        engine.add_request(ids, params, segment=f"segment {number}", cache_salt=salt)
        if number % 4 == 3:
            if number % 16 == 3:
                engine.step()
                engine.abort(str(number))
            while engine.has_unfinished:
                engine.step()
    engine.add_request([5, 6], SamplingParams(max_tokens=1))  # what the last ones leave is always alike
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize(("on_device", "controlled"), [(False, True), (True, False)], ids=["auto", "device"])
def test_nothing_grows_with_the_number_of_requests(monkeypatch, on_device, controlled):
    config = replace(
        CONFIG,
        acceptance=AcceptanceConfig(max_segments=SEGMENTS),
        segments=SegmentConfig(max_segments=SEGMENTS),
    )
    for module in (drafter_acceptance, cost_model, segments):
        monkeypatch.setattr(module, "CONFIG", config)
    drafter = SuffixDrafter(SuffixDrafter.Options(suffix_decoding_max_cached_requests=10))
    controller = None
    if controlled:
        controller = AutoController({"suffix": DraftPlan("suffix", 4)}, StepCosts([1, 64], [1.0, 2.0], 0.0))
    engine = toy_engine(
        ToyBackend(on_device=on_device),
        drafter=drafter,
        budget=4,
        branching=1,
        controller=controller,
        num_pages=60,
        max_num_seqs=4,
    )
    rooms = ("batches", "contexts")  # which the toy keeps for tests
    serve(engine, 0, 120)
    before = lengths(engine, rooms)
    serve(engine, 120, 120)
    gc.collect()
    assert engine.kv.usage == 0
    longer = grown(before, lengths(engine, rooms))
    # the last requests differ a little; one number kept of every third would be 40 more
    assert {path: sizes for path, sizes in longer.items() if sizes[1] > sizes[0] + 40} == {}
