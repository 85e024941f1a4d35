"""A step samples the tokens of the host, and gives the log-probabilities that the host reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.request import SamplingNeeds
from paceline.core.sampling import SamplingState
from paceline.verify.logprobs import logprobs_of_fields, token_logprobs
from paceline.verify.sampling import Sampler
from tests.constrain.tables import TableConstraint
from tests.large import in_turn

SHAPES = {"plain": [-1], "chain": [-1, 0, 1], "tree": [-1, 0, 0, 1, 1, 2, 4]}  # parents of a draft's nodes
VOCAB, ENDINGS = 300, (7, 250)
PROMPT, OUTPUT = [5, 9, 250, 9], [11, 12]
LENGTH = len(PROMPT) + len(OUTPUT)
DRAFTED = [OUTPUT[-1], 40, 12, 40, 12, 41, 7]  # of the nodes; the root holds the last token
PENALTIES = {"repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": 1.5}
BIAS = {"logit_bias": {3: 4.0, 40: 6.0, 299: -100.0}}
EVEN = {"allowed_token_ids": list(range(0, VOCAB, 2))}
TRUNCATED = {"top_k": 40, "top_p": 0.9, "min_p": 0.01}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    EVEN,
    PENALTIES,
    {"logprobs": 3, **EVEN},
    {"logprobs": 3, **PENALTIES},
    {"logprobs": 20, **BIAS, **TRUNCATED},
    {"logprobs": 0, **EVEN, **BIAS, **PENALTIES, **TRUNCATED},
    {"logprobs": 1, "min_tokens": 4, "stop_token_ids": [250]},
    {"logprobs": 2, "grammar": True},
    {"logprobs": 2, "grammar": True, **BIAS, "top_k": 5},
]


def request_of(number: int, temperature: float) -> tuple[SamplingParams, SamplingState]:
    options = dict(OPTIONS[number])
    # one id in seven, and the drafted ones: likely ids are forbidden
    allowed = {*range(number % 7, VOCAB, 7), 12, 40}
    constraint = TableConstraint(VOCAB, lambda path: allowed) if options.pop("grammar", False) else None
    params = SamplingParams(temperature=temperature, seed=number, **options)
    state = SamplingState(params, number, PROMPT, ENDINGS, constraint)
    for token in OUTPUT:
        state.logit_options.advance(token)
    return params, state


class Step:
    """A step over requests with all options, and padding, whose drafts have this shape."""

    def __init__(self, parents: list[int], temperature: float, device: torch.device) -> None:
        from paceline.backends.cuda.decode.decode_loop import make_requests
        from paceline.backends.cuda.kernels.sampling.logit_edits import make_edit_state
        from paceline.backends.cuda.kernels.step_rows import ShapeTables

        self.parents, self.nodes, self.device = parents, len(parents), device
        self.requests = [request_of(number, temperature) for number in range(len(OPTIONS))]
        self.slots, self.needs = self.integers([*range(len(OPTIONS)), -1]), SamplingNeeds.NOTHING
        state = self.state = make_requests(len(OPTIONS), 64, 16, device)
        self.edits = make_edit_state(len(OPTIONS), VOCAB, device)
        for slot, (params, sampling) in enumerate(self.requests):
            state.seeds[slot], state.temperatures[slot] = slot, params.temperature
            state.truncation[slot] = torch.tensor([*params.truncation], dtype=torch.float64)
            state.asks_logprobs[slot] = params.logprobs is not None
            if sampling.needs_edits(len(OUTPUT)):
                self.edits.init_slot(slot, sampling.logit_edits())
                self.edits.is_active[slot] = 1
        nothing, levels = torch.zeros(1), max(len(self.path(node)) for node in range(self.nodes))
        self.shape = ShapeTables(
            nothing, nothing, nothing, self.integers(parents), levels, 0, 0, is_chain=False
        )

    def integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def path(self, node: int) -> list[int]:
        return [] if node == 0 else [*self.path(self.parents[node]), DRAFTED[node]]

    def sampler(self) -> Any:
        from paceline.backends.cuda.decode.step_sampler import StepSampler

        head = SimpleNamespace(padded_width=VOCAB, width=VOCAB, shard=SimpleNamespace(size=1))
        config = SimpleNamespace(vocab_size=VOCAB)
        weights: Any = SimpleNamespace(head=head, config=config, device=self.device, shard=head.shard)
        return StepSampler(len(self.slots), self.shape, weights)

    def masks(self) -> tuple[list[int], list[np.ndarray]]:
        """The rows that can be accepted and need a mask, and their masks."""
        rows, masks = [], []
        for slot, (_, state) in enumerate(self.requests):
            for node in range(self.nodes if state.is_masked else 0):
                twin = self.state_at(slot, node)
                if twin is not None:
                    rows.append(slot * self.nodes + node)
                    masks.append(twin.token_mask(len(OUTPUT) + len(self.path(node)), VOCAB))
        return rows, masks

    def state_at(self, slot: int, node: int) -> SamplingState | None:
        """The sampling state of a request at a node; None if its grammar does not allow the path."""
        constraint, path = self.requests[slot][1].constraint, self.path(node)
        if constraint is not None and not all(map(constraint.allows, path)):
            return None
        return self.requests[slot][1].branch(path)

    def run(self, sampler: Any, logits: np.ndarray, needs: int) -> tuple[list[int], torch.Tensor]:
        """The tokens of all rows, and their fields."""
        from paceline.backends.cuda.kernels.sampling.gumbel import take_best

        depths = [len(self.path(node)) for node in range(self.nodes)]
        positions = self.integers([LENGTH - 1 + depth for depth in depths] * len(self.slots))
        tokens = self.integers(DRAFTED[: self.nodes] * len(self.slots))
        rows, masks = self.masks()
        sampler.masks.send(len(positions), np.array(rows, dtype=np.int32), masks)
        sampler.begin(self.state, self.slots.clamp(min=0).long())
        workspace: Any = SimpleNamespace(logits=torch.tensor(logits, device=self.device))
        inputs = tokens, positions, self.slots, self.state
        candidates = sampler.sample(workspace, *inputs, needs, self.edits)
        chosen = torch.empty_like(positions)
        take_best(candidates, chosen)
        return chosen.tolist(), sampler.logprobs.view(len(positions), -1).clone()


ALL = int(
    SamplingNeeds.TRUNCATION | SamplingNeeds.LOGIT_EDITS | SamplingNeeds.LOGPROBS | SamplingNeeds.TOKEN_MASK
)


@pytest.mark.parametrize(("parents", "temperature"), in_turn(SHAPES, {"sampled": 0.9, "greedy": 0.0}))
def test_each_row_gets_what_the_host_gives_it_beside_rows_with_other_options(
    parents: list[int], temperature: float, device: torch.device
) -> None:
    step = Step(parents, temperature, device)
    shape = len(step.slots) * step.nodes, VOCAB
    logits = np.random.default_rng(step.nodes).normal(size=shape).astype(np.float32) * 3
    tokens, fields = step.run(step.sampler(), logits, ALL)
    compared, ranks = 0, set()
    for slot, (params, _) in enumerate(step.requests):
        for node in range(step.nodes):
            row, depth, state = slot * step.nodes + node, len(step.path(node)), step.state_at(slot, node)
            if state is None:
                continue
            token = Sampler(VOCAB).sample(state, logits[row], LENGTH + depth, len(OUTPUT) + depth)
            assert tokens[row] == token
            if params.logprobs is not None:
                expected = token_logprobs(logits[row], token, params.logprobs)
                given = logprobs_of_fields(fields[row].tolist(), token, params.logprobs)
                assert list(given.items()) == list(expected.items())
                ranks.add(expected[token].rank)
                compared += 1
    assert compared >= 8 * step.nodes - 6
    assert max(ranks) > 20, "no mask or edit made an unlikely token the best"
