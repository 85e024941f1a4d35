"""Bias, min_tokens and penalties on the device: the logits of the host, along every path of a draft."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.verify.sampling import Sampler

VOCAB, ENDINGS = 2100, (7, 2050)  # more than a block
PROMPT, OUTPUT = [5, 9, 2050, 9], [11, 9]
PARENTS = [-1, 0, 1, 0, 3]  # a tree; node 0 is the root
DRAFTED = [OUTPUT[-1], 11, 40, 12, 12]  # the root holds the last token
OPTIONS = [
    {"logit_bias": {3: 2.5, 11: -100.0, 2099: 7.0}},
    {"min_tokens": 4, "stop_token_ids": [2050]},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.3, "frequency_penalty": -0.7},
    {
        "repetition_penalty": 0.9,
        "frequency_penalty": 1.1,
        "presence_penalty": 0.3,
        "min_tokens": 3,
        "logit_bias": {9: 1.0},
    },
]


def path(node: int) -> list[int]:
    return [] if node == 0 else [*path(PARENTS[node]), DRAFTED[node]]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_edited_logits_are_those_of_the_host(options: dict[str, object], device: torch.device) -> None:
    from paceline.backends.cuda.kernels.sampling.logit_edits import count_tokens, edit_logits, make_edit_state

    request = SamplingState(SamplingParams(**options), 1, PROMPT, ENDINGS)  # type: ignore[arg-type]
    for token in OUTPUT:
        request.advance(token)
    state = make_edit_state(3, VOCAB, device)
    state.history.fill_(9)  # of an earlier request
    state.bias.fill_(9.0)
    state.init_slot(1, request.logit_edits())
    state.is_active[1] = 1

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    nodes, slots = len(PARENTS), integers([1, 0, -1])  # with edits, without, padding
    for length in (6, 8):  # the second time after a step that accepted two tokens
        logits = np.random.default_rng(2).normal(size=(3 * nodes, VOCAB)).astype(np.float32) * 4
        there = torch.tensor(logits, device=device)
        depths = [len(path(node)) for node in range(nodes)]
        positions = integers([length - 1 + depth for depth in depths] * 3)
        edit_logits(there, VOCAB, slots, state, integers(DRAFTED * 3), positions, integers(PARENTS), 2)
        for node in range(nodes):
            num_output = length - len(PROMPT) + depths[node]
            twin = request.branch(path(node))
            expected = Sampler(VOCAB).edited_logits(twin, logits[node], num_output)
            np.testing.assert_array_equal(there[node].cpu().numpy(), expected)
        np.testing.assert_array_equal(there[nodes:].cpu().numpy(), logits[nodes:])
        count_tokens(slots, state, integers([[40, 9, 77]] * 3), integers([2, 2, 2]))
        request.advance(40)
        request.advance(9)
