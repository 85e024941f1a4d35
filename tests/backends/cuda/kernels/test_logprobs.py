"""Log-probabilities of the device are those of the host, every bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.errors import BackendError
from paceline.verify.logprobs import logprobs_of_fields, token_logprobs

SLOTS = [2, -1, 0]  # of the requests of a pass; -1 is padding
NODES = 2


def test_fields_give_the_log_probabilities_of_the_host(device: torch.device) -> None:
    from paceline.backends.cuda.kernels.sampling.gumbel import candidates_for, gumbel_argmax, take_best
    from paceline.backends.cuda.kernels.sampling.logprobs import logprob_buffers, write_logprobs

    rows, vocab = len(SLOTS) * NODES, 2060  # two blocks
    logits = np.random.default_rng(vocab).normal(size=(rows, vocab)).astype(np.float32) * 3
    logits[1] = np.round(logits[1])  # ties
    there = torch.from_numpy(logits).to(device)
    candidates, buffers = candidates_for(rows, vocab, device), logprob_buffers(rows, vocab, device)
    temperatures = torch.full((rows,), 0.9, dtype=torch.float64, device=device)
    numbers = torch.arange(rows, device=device)
    gumbel_argmax(there, vocab, temperatures, numbers, numbers.int(), candidates, rows)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    take_best(candidates, tokens)
    buffers.fields.fill_(-7)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    asks = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    write_logprobs(there, vocab, slots, asks, candidates, buffers, NODES)
    fields = buffers.fields.cpu()
    for row in range(NODES):  # of slot 2
        for count in (0, 3, 20):
            expected = token_logprobs(logits[row], int(tokens[row]), count)
            given = logprobs_of_fields(fields[row].tolist(), int(tokens[row]), count)
            assert list(given.items()) == list(expected.items())
    assert (fields[NODES:] == -7).all()  # padding, and a request that does not ask


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("unusable", [math.nan, math.inf])
def test_unusable_logits_of_ids_that_a_mask_forbids_are_the_error_that_the_host_raises(
    unusable: float, device: torch.device
) -> None:
    """The token is sampled from masked logits, so sampling does not notice them."""
    from paceline.backends.cuda.kernels.sampling.gumbel import candidates_for, gumbel_argmax
    from paceline.backends.cuda.kernels.sampling.logprobs import logprob_buffers, write_logprobs

    vocab = 2060
    logits = np.random.default_rng(1).normal(size=(2, vocab)).astype(np.float32)
    logits[0, 7] = unusable
    raw = torch.from_numpy(logits).to(device)
    masked = raw.clone()
    masked[0, 7] = -math.inf
    candidates, buffers = candidates_for(2, vocab, device), logprob_buffers(2, vocab, device)
    numbers = torch.arange(2, device=device)
    greedy = torch.zeros(2, dtype=torch.float64, device=device)
    gumbel_argmax(masked, vocab, greedy, numbers, numbers.int(), candidates, 2)
    asks = torch.ones(2, dtype=torch.int32, device=device)
    write_logprobs(raw, vocab, numbers.int(), asks, candidates, buffers, 1)
    tokens, (bad, good) = masked.argmax(1).tolist(), buffers.fields.tolist()
    with pytest.raises(BackendError, match="NaN or infinity"):
        token_logprobs(logits[0], tokens[0], 3)
    with pytest.raises(BackendError, match="NaN or infinity"):
        logprobs_of_fields(bad, tokens[0], 3)
    assert logprobs_of_fields(good, tokens[1], 3) == token_logprobs(logits[1], tokens[1], 3)
