"""Drawn drafts under the classic rules: outputs have the target's distribution, whatever the draft's is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from paceline.core.params import SamplingParams
from paceline.draft.base import DraftSampling
from paceline.draft.model import model_drafter
from paceline.engine.admission import Limits
from paceline.verify.rules import RULES
from tests.draft.draft_models import HazyToy, Plans, chain, toy_drafter, tree
from tests.engines import new_engine
from tests.large import REPEATS
from tests.toy import ToyBackend, ToyTokenizer

VOCAB = 4
PROMPT = [1, 3, 2]
TEMPERATURE = 3.0
TRIALS = 1000


def target_distribution(length: int) -> dict[tuple[int, ...], float]:
    """The probability of every output of this length, token by token from the toy's logits."""
    chances = {}
    for output in product(range(VOCAB), repeat=length):
        chance = 1.0
        for at in range(length):
            path = np.array([*PROMPT, *output[:at]])
            logits = ToyBackend(vocab=VOCAB).logits_of(path, np.arange(len(path))) / TEMPERATURE
            chance *= float(np.exp(logits[output[at]]) / np.exp(logits).sum())
        chances[output] = chance
    return chances


def outputs(rule: str, plan, sampling: DraftSampling):
    drafter = toy_drafter(HazyToy(vocab=VOCAB, max_rows=256), sampling)
    engine = new_engine(
        ToyBackend(vocab=VOCAB, max_rows=256),
        ToyTokenizer(),
        Limits(VOCAB, 32, 24, 256),
        num_pages=400,
        controller=Plans(plan),
        drafters={drafter.name: drafter},
        rule=RULES[rule].verify,
    )
    params = {"temperature": TEMPERATURE, "max_tokens": 4, "ignore_eos": True}
    added = [engine.add_request(PROMPT, SamplingParams(seed=seed, **params))[0] for seed in range(TRIALS)]
    while engine.has_unfinished:
        engine.step()
    assert not any(request.error or request.failed_drafters for request in added)
    accepted = sum(request.speculative.num_accepted_draft_tokens for request in added)
    drafted = sum(request.speculative.num_draft_tokens for request in added)
    assert 0.2 * drafted < accepted < drafted
    return [tuple(request.output_token_ids[:3]) for request in added]


def distance(found: list[tuple[int, ...]]) -> float:
    """Chi-squared of outputs against the target's distribution, in standard deviations from its mean."""
    expected = {output: chance * TRIALS for output, chance in target_distribution(3).items()}
    likely = [output for output, count in expected.items() if count > 5]
    rest = TRIALS - sum(expected[output] for output in likely)
    statistic = sum((found.count(output) - expected[output]) ** 2 / expected[output] for output in likely)
    statistic += (sum(output not in likely for output in found) - rest) ** 2 / max(rest, 1.0)
    freedom = len(likely)
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        pytest.param("rejection", chain(3), marks=REPEATS),
        ("rejection", tree(6, 2)),
        ("block", chain(3)),
        pytest.param("traversal", chain(3), marks=REPEATS),
        ("traversal", tree(6, 2)),
    ],
    ids=[
        "rejection of a chain",
        "rejection in a tree",
        "block",
        "traversal of a chain",
        "traversal of a tree",
    ],
)
def test_outputs_have_the_targets_distribution(rule, plan):
    assert distance(outputs(rule, plan, DraftSampling.INDEPENDENT)) < 4.5


def test_the_distance_reports_when_a_draft_names_another_distribution_than_it_drew_from(plant):
    """The negative control of the test above."""
    merged = model_drafter.to_draft_trees

    def misnamed(trees):
        drafted = merged(trees)
        wrong = np.full_like(drafted.draws.draft_probs, 1 / VOCAB)
        return replace(drafted, draws=replace(drafted.draws, draft_probs=wrong))

    plant(model_drafter, "to_draft_trees", misnamed)
    assert distance(outputs("rejection", chain(3), DraftSampling.INDEPENDENT)) > 7
