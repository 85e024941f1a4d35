"""Token masks on the device: with every other sampling option, the token of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.core.token_masks import num_words, packed, packed_id
from paceline.verify.sampling import Sampler

VOCAB, ENDINGS = 2100, (7, 2050)  # more than a block, and not a multiple of 32
ROWS = 6
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 0.7, "min_p": 0.2, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.0, "min_tokens": 4, "logit_bias": {5: 3.0, 9: -100.0}},
    {"temperature": 0.0, "repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": -0.7},
    {"temperature": 1.0, "allowed_token_ids": [3, 7, 9, 2050], "min_tokens": 2},
]


class Allows:
    """A constraint that allows these ids."""

    def __init__(self, mask: np.ndarray, forced: tuple[int, ...] = ()) -> None:
        self.mask, self.run = mask, forced

    def forced(self) -> tuple[int, ...]:
        return self.run

    def allows(self, token: int) -> bool:
        return bool(self.mask[token >> 5] >> (token & 31) & 1)

    def packed_mask(self) -> np.ndarray:
        return self.mask

    def advance(self, token: int) -> None:
        return

    def branch(self) -> Allows:
        return self


def masks() -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """Half of the ids, few, the endings, one that is forced, the last id, and all."""
    rng, ids = np.random.default_rng(4), np.arange(VOCAB)
    return [
        (packed(rng.random(VOCAB) < 0.5), ()),
        (packed(rng.random(VOCAB) < 0.004), ()),
        (packed(np.isin(ids, ENDINGS)), ()),
        (packed_id(31, VOCAB), (31,)),
        (packed_id(VOCAB - 1, VOCAB), ()),
        (packed(np.ones(VOCAB, dtype=np.bool_)), ()),
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_masked_tokens_are_those_of_the_host(options: dict[str, Any], device: torch.device) -> None:
    from paceline.backends.cuda.kernels.sampling.gumbel import candidates_for, gumbel_argmax, take_best
    from paceline.backends.cuda.kernels.sampling.logit_edits import edit_logits, make_edit_state
    from paceline.backends.cuda.kernels.sampling.token_masks import mask_logits, row_masks
    from paceline.backends.cuda.kernels.sampling.truncation import find_thresholds, truncation_buffers

    params, prompt, output = SamplingParams(seed=3, **options), [5, 9, 2050, 9], [11, 9]
    logits = np.random.default_rng(2).normal(size=(ROWS, VOCAB)).astype(np.float32) * 4
    logits[0, :5] = np.nan, np.inf, 20.0, -np.inf, 0.0  # only row 5 allows them all
    logits[0, [3, 9]] = 1.0
    allowed = masks()
    allowed[0][0][0] &= ~0b11
    states = [SamplingState(params, 3, prompt, ENDINGS, Allows(*each)) for each in allowed]
    for state in states:
        for token in output:
            state.advance(token)
    length = len(prompt) + len(output)
    expected = [
        Sampler(VOCAB).sample(state, line, length, len(output))
        for state, line in zip(states, logits, strict=True)
    ]

    def sent(values: Any, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    there, rows = sent(logits, torch.float32), row_masks(2 * ROWS, VOCAB, device)
    assert rows.masks.shape == (2 * ROWS, num_words(VOCAB))
    given = [state.token_mask(len(output), VOCAB) for state in states]
    rows.send(ROWS, np.arange(ROWS, dtype=np.int32), given)
    mask_logits(there, VOCAB, rows, ROWS)
    needs_edits = states[0].needs_edits(len(output))
    if needs_edits:
        state = make_edit_state(ROWS, VOCAB, device)
        for slot in range(ROWS):
            state.init_slot(slot, states[slot].logit_edits())
        state.is_active.fill_(1)
        positions, slots = sent([length - 1] * ROWS), sent(range(ROWS))
        edit_logits(there, VOCAB, slots, state, sent([9] * ROWS), positions, sent([-1]), 0)
    temperatures, thresholds = sent([params.temperature] * ROWS, torch.float64), None
    if not params.truncation.keeps_all:
        buffers = truncation_buffers(ROWS, VOCAB, device)
        truncation = sent([params.truncation] * ROWS, torch.float64)
        find_thresholds(there, VOCAB, temperatures, truncation, buffers, ROWS)
        thresholds = buffers.thresholds
    candidates, chosen = candidates_for(ROWS, VOCAB, device), sent([0] * ROWS)
    seeds, positions = sent([3] * ROWS, torch.int64), sent([length - 1] * ROWS)
    gumbel_argmax(there, VOCAB, temperatures, seeds, positions, candidates, ROWS, thresholds)
    take_best(candidates, chosen)
    assert chosen.tolist() == expected
    assert expected[2] in ENDINGS
    assert expected[3:5] == [31, VOCAB - 1]


def test_rows_without_a_mask_stay_as_they_are(device: torch.device) -> None:
    from paceline.backends.cuda.kernels.sampling.token_masks import mask_logits, row_masks

    logits = torch.randn((4, VOCAB + 3), device=device)
    before, rows = logits.clone(), row_masks(5, VOCAB, device)
    mask_logits(logits, VOCAB, rows, 4)
    assert torch.equal(logits, before)
    rows.send(4, np.array([2], dtype=np.int32), [packed_id(40, VOCAB)])
    mask_logits(logits, VOCAB, rows, 4)
    assert torch.equal(logits[[0, 1, 3]], before[[0, 1, 3]])
    assert torch.equal(logits[2, [40, VOCAB]], before[2, [40, VOCAB]])
    assert logits[2].isfinite().nonzero().flatten().tolist() == [40, VOCAB, VOCAB + 1, VOCAB + 2]
    rows.send(4, np.zeros(0, dtype=np.int32), [])
    assert (rows.lines[:4] == -1).all()
