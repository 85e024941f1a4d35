"""Top-k, top-p and min-p on the device: what the host keeps of the same logits, whatever they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.core.truncation import Truncation
from paceline.verify.sampling import Sampler
from tests.verify.reference import truncate_reference
from tests.verify.truncations import TRUNCATIONS

VOCAB, ROWS = 300, 4
EXAMPLES = 150 if torch.cuda.is_available() else 3  # the interpreter is slow
Options = tuple[float, Truncation]  # temperature, truncation
PLAIN: Options = (1.0, Truncation())


def kept_ids(
    logits: npt.NDArray[np.float32], options: list[Options], device: torch.device
) -> tuple[list[list[int]], Callable[[], list[int]]]:
    """The ids that each row keeps, and a sampler of tokens with the row's number as seed and position."""
    from paceline.backends.cuda.kernels.sampling.gumbel import candidates_for, gumbel_argmax, take_best
    from paceline.backends.cuda.kernels.sampling.truncation import find_thresholds, truncation_buffers

    rows, vocab = logits.shape
    kept = truncation_buffers(rows, vocab, device)
    on_device = torch.from_numpy(logits).to(device)
    temperatures = torch.tensor([own for own, _ in options], dtype=torch.float64, device=device)
    rest = torch.tensor([own for _, own in options], dtype=torch.float64, device=device)
    find_thresholds(on_device, vocab, temperatures, rest, kept, rows)
    found: list[list[int]] = []

    def draw() -> list[int]:
        candidates = candidates_for(rows, vocab, device)
        count = torch.arange(rows, device=device)
        gumbel_argmax(on_device, vocab, temperatures, count, count.int(), candidates, rows, kept.thresholds)
        tokens = torch.empty(rows, dtype=torch.int32, device=device)
        take_best(candidates, tokens)
        return tokens.tolist()

    for row, threshold, last in zip(
        logits, kept.thresholds.values.tolist(), kept.thresholds.last_ids.tolist(), strict=True
    ):
        scaled = row.astype(np.float64) / (options[len(found)][0] or 1.0)
        likely = (scaled > threshold) | ((scaled == threshold) & (np.arange(vocab) <= last))
        found.append(np.flatnonzero(likely & (row > -np.inf)).tolist())
    return found, draw


def check(logits: npt.NDArray[np.float32], options: list[Options], device: torch.device) -> None:
    kept, _ = kept_ids(logits, options, device)
    for row, ids, (temperature, truncation) in zip(logits, kept, options, strict=True):
        if temperature:
            expected = truncate_reference(row.astype(np.float64) / temperature, truncation)
            assert ids == expected.tolist(), truncation


options_of_a_row = st.tuples(st.sampled_from([0.0, 0.3, 1.0, 7.0]), TRUNCATIONS)


@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, 2**32 - 1),
    spreads=st.lists(st.sampled_from([0.0, 0.01, 1.0, 4.0, 40.0]), min_size=ROWS, max_size=ROWS),
    steps=st.lists(st.sampled_from([0.0, 0.25, 3.0]), min_size=ROWS, max_size=ROWS),
    options=st.lists(options_of_a_row, min_size=ROWS, max_size=ROWS),
)
def test_the_device_keeps_the_ids_that_the_host_keeps(
    device: torch.device, seed: int, spreads: list[float], steps: list[float], options: list[Options]
) -> None:
    """Flat rows and steep ones, with ties (values are whole steps), zeros of both signs and forbidden ids."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(ROWS, VOCAB)) * np.array(spreads)[:, None]
    for row, step in zip(logits, steps, strict=True):
        if step:
            row[:] = np.round(row / step) * step
    logits[generator.random(logits.shape) < 0.1] = -0.0
    logits[:, 1:][generator.random((ROWS, VOCAB - 1)) < 0.1] = -np.inf
    check(logits.astype(np.float32), options, device)


def test_rows_with_more_candidates_than_fit_the_list(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.kernels.sampling import truncation

    monkeypatch.setattr(truncation, "MAX_CANDIDATES", 40)
    logits = np.random.default_rng(3).normal(size=(4, 2500)).astype(np.float32)  # more than a block
    logits[1] = np.round(logits[1])
    options = [(1.0, Truncation(900, 0.9)), (1.0, Truncation(0, 0.8)), (0.5, Truncation(1000)), PLAIN]
    check(logits, options, device)


def test_tokens_are_those_of_the_host_and_unusable_logits_give_none(device: torch.device) -> None:
    logits = np.random.default_rng(4).normal(size=(5, VOCAB)).astype(np.float32)
    logits[0, 7], logits[1, 9], logits[2] = np.nan, np.inf, -np.inf
    truncation = Truncation(5, 0.9, 0.1)
    options: list[Options] = [(1.0, truncation)] * 4 + [(0.0, truncation)]
    tokens = kept_ids(logits, options, device)[1]()
    assert tokens[:3] == [-1, -1, -1]
    for number in (3, 4):
        params = SamplingParams(temperature=options[number][0], **truncation._asdict())
        state = SamplingState(params, number, (), ())
        expected = Sampler(VOCAB).sample(state, logits[number], number + 1, 0)
        assert tokens[number] == expected
