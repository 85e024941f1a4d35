"""On a real model: an output that one engine began and another ends has the bytes of one engine alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.build import LoadedModel
from tests.large import repeated
from tests.lossless.conftest import MODEL
from tests.lossless.subject import PLANS, Case, Configs, Outcome, Truth, make_engine

pytestmark = pytest.mark.real


@pytest.mark.parametrize("turn", [0, *repeated(*range(1, 7))])
def test_every_method_continues_where_another_engine_stopped(
    turn: int, model: LoadedModel, configs: Configs, cases: list[Case], truth: Truth
) -> None:
    """Each case with another method, cut after another number of tokens; logits are those of one run."""
    engine = make_engine(MODEL, model, configs.values(), max_num_seqs=32)
    plans, outcomes, wanted = list(PLANS.values()), [], []
    for number, case in enumerate(3 * cases[turn % 2 :: 2]):
        whole = truth.of(case)
        params = replace(case.params(plans[(number + turn) % len(plans)]), prompt_logprobs=None)
        cut = (3 + 5 * number + turn) % max(len(tokens) for _, tokens, *_ in whole)
        resume = {child: tokens[:cut] for child, (_, tokens, *_) in enumerate(whole) if cut < len(tokens)}
        outcomes.append(Outcome(engine.add_request(case.prompt, params, resume=resume)))
        for child in resume:
            text, tokens, logprobs, finish, stop, _, error = whole[child]
            wanted.append((text, tokens, logprobs[cut:], finish, stop, [], error))
    while engine.has_unfinished:
        engine.step()
    assert [output for outcome in outcomes for output in outcome.bytes()] == wanted
    assert sum(outcome.count("num_spec_steps") for outcome in outcomes) > 0
    engine.close()
