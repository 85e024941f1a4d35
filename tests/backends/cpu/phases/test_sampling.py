"""Tokens that a pass chooses are those that the host would choose from its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend
from paceline.core.forward import Choices, ForwardOutput
from paceline.core.truncation import KEEPS_ALL
from paceline.models.checkpoint import Checkpoint
from tests.backends.cpu.checkpoints import floats
from tests.backends.driver import drive, run
from tests.verify.reference import choose_token_reference

POISON = 7  # a token whose logits are no numbers
PARENTS = [-1, 0, 0, 1]
TOKENS = [[5, 9, 3], [1, 2, 4, 6], [POISON], [8]]
# rows:    0  1  2    3  4  5  6   7         8
CHOSEN, WANTED = [2, 3, 5, 7, 8], [1, 4, 6]
SEEDS = [3, 2**64 - 1, 5, 6, 7]


@pytest.fixture(scope="module", params=[1, 2, 3])
def backend(
    request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]
) -> Iterator[CpuBackend]:
    checkpoint = checkpoint_of("uneven")
    name = "model.embed_tokens.weight"
    embedding = checkpoint.tensors[name].float32().copy()
    embedding[POISON] = np.nan
    tensors = {**checkpoint.tensors, name: floats(embedding)}
    backend = CpuBackend.load(
        replace(checkpoint, tensors=tensors), quantization="none", threads=request.param, max_rows=16
    )
    yield backend
    backend.close()


def output_of(
    backend: CpuBackend, temperatures: list[float] | None, wanted: list[int] | None
) -> ForwardOutput:
    """One pass over a chain, a tree and two single tokens, at different lengths."""
    requests = drive(backend, pages_each=2, count=4)
    for length, request, tokens in zip([3, 0, 2, 11], requests, TOKENS, strict=True):
        if length:
            request.extend(list(range(20, 20 + length)))
        request.ask(tokens, PARENTS if len(tokens) == 4 else None)
    choices = None
    if temperatures is not None:
        choices = Choices(
            np.array(CHOSEN, np.int32), np.array(SEEDS, np.uint64), np.array(temperatures, np.float64)
        )
    return run(requests, wanted, choices=choices)


POSITIONS = [3, 4, 5, 0, 1, 1, 2, 2, 11]  # of all rows


@pytest.mark.parametrize("temperatures", [[0.0] * 5, [1.0] * 5, [0.7, 0.0, 2.0, 1.0, 0.0]])
@pytest.mark.parametrize("wanted", [WANTED, []])
def test_sampled_tokens_are_those_of_the_reference_and_other_rows_give_logits(backend, temperatures, wanted):
    logits = output_of(backend, None, None).logits.copy()
    expected = [
        choose_token_reference(logits[row], max(temperature, 1e-9), KEEPS_ALL, seed, POSITIONS[row] + 1)
        for row, seed, temperature in zip(CHOSEN, SEEDS, temperatures, strict=True)
    ]
    output = output_of(backend, temperatures, wanted)
    assert output.chosen is not None
    assert output.chosen.tolist() == expected
    assert expected[3] == -1
    assert (output.logits == logits[wanted]).all()


def test_a_pass_after_sampling_is_a_plain_one(backend):
    output_of(backend, [1.0] * 5, [])
    assert output_of(backend, None, WANTED).chosen is None
