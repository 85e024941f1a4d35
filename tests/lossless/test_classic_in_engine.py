"""The classic rules in the engine: every option, endings, log-probabilities, neighbours, errors.

Their distribution is proven elsewhere; here the engine around them must not disturb it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import DraftPlan, DraftTrees, Draws
from paceline.draft.base import Drafter
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.verify.draws import draw
from paceline.verify.logprobs import token_logprobs
from paceline.verify.noise import STREAM_DRAFT
from paceline.verify.rules import RULES
from tests.engines import new_engine
from tests.toy import VOCAB, ToyBackend, ToyTokenizer, drain

CLASSIC = [name for name, entry in RULES.items() if not entry.same_bytes]
SHAPES = {True: [-1, -1, 0, 0, 1, 2], False: [-1, 0, 1, 2]}  # parents of a tree, of a chain
OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "min_tokens": 10, "logit_bias": {0: 6.0}},
    {"temperature": 0.0, "frequency_penalty": 1.0},
    {"temperature": 1.0, "allowed_token_ids": range(2, 60), "bad_words": ["A", "B", "CD", "HI", "IH"]},
]


class HazyDrafter(Drafter):
    """Knows the toy's logits, blurred: draws some nodes from them and chooses others."""

    name = "hazy"

    def __init__(self, parents: list[int]) -> None:
        self.parents = parents
        self.toy = ToyBackend()

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        tokens: list[int] = []
        rows: list[int] = []
        draft_probs = []
        for request in requests:
            paths: list[list[int]] = []
            first = len(request.token_ids)
            for node, parent in enumerate(self.parents):
                path = [*request.token_ids, *(paths[parent] if parent >= 0 else [])]
                logits = self.toy.logits_of(np.array(path), np.arange(len(path))).astype(np.float64) / 2
                siblings = [paths[other][-1] for other in range(node) if self.parents[other] == parent]
                probs = np.exp(logits - logits.max())
                if node % 3 == 1:
                    probs[siblings] = 0.0
                    token = int(np.argmax(probs))
                    rows.append(-1)
                else:
                    token = draw(probs, request.seed, first, STREAM_DRAFT, node, siblings)
                    rows.append(len(draft_probs))
                    draft_probs.append(probs / probs.sum())
                paths.append([*path[first:], token])
                tokens.append(token)
        return DraftTrees(
            np.array(tokens, dtype=np.int32),
            np.array(self.parents * len(requests), dtype=np.int32),
            np.arange(len(requests) + 1, dtype=np.int32) * len(self.parents),
            Draws(np.array(draft_probs), np.array(rows, dtype=np.int32)),
        )


def engine_with(rule: str, backend: ToyBackend | None = None) -> Engine:
    drafter = HazyDrafter(SHAPES[RULES[rule].trees])
    return new_engine(
        backend or ToyBackend(max_rows=256),
        ToyTokenizer(),
        Limits(VOCAB, 256, 16, 256),
        num_pages=400,
        controller=FixedController(DraftPlan(drafter.name, len(drafter.parents), branching=2)),
        drafters={drafter.name: drafter},
        rule=RULES[rule].verify,
    )


def requests():
    for number in range(12):
        options = OPTIONS[number % len(OPTIONS)] | {"max_tokens": 6 + number, "seed": number, "logprobs": 2}
        yield np.random.default_rng(number).integers(2, VOCAB, 3 + number).tolist(), SamplingParams(**options)


def served(engine: Engine, wanted) -> list[Request]:
    added = [engine.add_request(ids, params)[0] for ids, params in wanted]
    drain(engine)
    assert not any(request.failed_drafters for request in added)
    return added


@pytest.mark.parametrize("rule", CLASSIC)
def test_a_text_does_not_depend_on_its_neighbours(rule):
    together = served(engine_with(rule), requests())
    for request, alone in zip(together, requests(), strict=True):
        (other,) = served(engine_with(rule), [alone])
        assert request.output_token_ids == other.output_token_ids
        assert request.logprobs == other.logprobs
    assert sum(request.speculative.num_accepted_draft_tokens for request in together) > 20


@pytest.mark.parametrize("rule", CLASSIC)
def test_greedy_texts_are_those_of_plain_decoding(rule):
    wanted = [(ids, params) for ids, params in requests() if params.greedy]
    plain = engine_with(rule)
    plain._controller = FixedController()
    texts = [request.output_token_ids for request in served(plain, wanted)]
    assert [request.output_token_ids for request in served(engine_with(rule), wanted)] == texts


@pytest.mark.parametrize("rule", CLASSIC)
def test_texts_end_where_they_must_and_have_the_log_probabilities_of_their_own_path(rule):
    toy = ToyBackend()
    for request in served(engine_with(rule), requests()):
        output = request.output_token_ids
        assert 0 not in output[:-1], "went on after its end"
        assert request.finish_reason == ("stop" if output[-1] == 0 else "length")
        assert len(output) == request.params.max_tokens or request.finish_reason == "stop"
        assert len(output) >= request.params.min_tokens
        for place, token in enumerate(output):
            path = [*request.prompt_token_ids, *output[:place]]
            logits = toy.logits_of(np.array(path), np.arange(len(path)))
            expected = token_logprobs(logits, token, 2)
            found = request.logprobs[place]
            assert {key: entry.logprob for key, entry in found.items()} == {
                key: entry.logprob for key, entry in expected.items()
            }


@pytest.mark.parametrize("rule", CLASSIC)
def test_unusable_logits_end_their_own_request_only(rule):
    """Drafts meet the broken token more often than texts do: only a text that goes through it ends."""
    broken = 66
    drafted = engine_with(rule, ToyBackend(max_rows=256, nan_after=broken))
    plain = engine_with("pathwise", ToyBackend(max_rows=256, nan_after=broken))
    plain._controller = FixedController()
    for engine in (drafted, plain):
        added = served(engine, requests())
        failed = [request for request in added if request.finish_reason == "error"]
        assert 0 < len(failed) < 6
        for request in added:
            assert request in failed or broken not in request.token_ids[:-1]
