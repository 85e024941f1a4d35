"""Batches of examples with about the same number of tokens, in an order fixed by the seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ConfigError
from paceline.train.examples import Examples

Indices = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]
MAX_HELD_OUT = 512  # prompts
POOL = 2048  # examples sorted by length together, so that batches have little padding


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences."""

    tokens: torch.Tensor  # int64 [batch, tokens]
    answers: torch.Tensor  # int64 [batch] index of the first answered token
    lengths: torch.Tensor  # int64 [batch]
    starts: Sequence[int] = ()  # place of each one's first token among those of all examples, if it has one


def split(examples: Examples, held_out: float, seed: int) -> tuple[Indices, Indices]:
    """Indices of the training examples and of the held-out ones, both ascending.

    All answers to one prompt are on the same side. At most MAX_HELD_OUT prompts are held out, and at
    least one unless there is only one prompt or `held_out` is 0.
    """
    number = int(examples.prompts.max()) + 1
    order = np.random.default_rng([seed, 1]).permutation(number)
    min_held_out = int(held_out > 0 and number > 1)
    held_out_prompts = order[: min(max(int(held_out * number), min_held_out), MAX_HELD_OUT)]
    is_held_out = np.isin(examples.prompts, held_out_prompts)
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def segment_shares(examples: Examples, weights: Mapping[str, float]) -> Shares | None:
    """How often each example is in an epoch [examples], by the weight of its segment; None: all once."""
    if not weights:
        return None
    if unknown := sorted(set(weights) - set(examples.segments)):
        known = ", ".join(sorted(set(examples.segments)))
        raise ConfigError(f"--weights names {', '.join(unknown)}, but the data has the segments {known}.")
    return np.array([weights.get(segment, 1.0) for segment in examples.segments])


def _repeated(chosen: Indices, shares: Shares, generator: np.random.Generator) -> Indices:
    """Each chosen example as often as its share says: rounded up as often as its fraction says.

    One of them at least, so that there is no epoch without a batch.
    """
    whole, rest = np.divmod(shares[chosen], 1.0)
    counts = whole.astype(np.int64) + (generator.random(len(chosen)) < rest)
    if not counts.any():
        counts[shares[chosen].argmax()] = 1
    return np.repeat(chosen, counts)


def epoch_batches(
    examples: Examples,
    chosen: Indices,
    batch_tokens: int,
    seed: int,
    epoch: int,
    shares: Shares | None = None,
) -> list[Indices]:
    """Every chosen example once, in batches of at most `batch_tokens` tokens including padding.

    With `shares` [examples], as often as that in the mean of all epochs. A longer example gets its own batch.
    """
    generator = np.random.default_rng([seed, 2, epoch])
    order = generator.permutation(chosen if shares is None else _repeated(chosen, shares, generator))
    lengths = examples.lengths
    batches: list[Indices] = []
    for start in range(0, len(order), POOL):
        pool = order[start : start + POOL]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        begin = 0
        for end in range(1, len(pool) + 1):
            # sorted ascending, so the next example would set the padded length
            if end == len(pool) or lengths[pool[end]] * (end + 1 - begin) > batch_tokens:
                batches.append(pool[begin:end])
                begin = end
    return [batches[index] for index in generator.permutation(len(batches))]


def all_batches(
    examples: Examples, chosen: Indices, batch_tokens: int, seed: int, shares: Shares | None = None
) -> Iterator[Indices]:
    """Batches of one epoch after another, without end."""
    for epoch in count():
        yield from epoch_batches(examples, chosen, batch_tokens, seed, epoch, shares)


def on_device(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """A copy on the device. A GPU does not stop for it: the host must be steps ahead to keep it busy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def collate(examples: Examples, indices: Indices, device: torch.device) -> Batch:
    """The examples at these indices as one padded batch."""
    sequences = [examples.ids(int(index)) for index in indices]
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    tokens = np.zeros((len(sequences), int(lengths.max())), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    answers = examples.answers[indices].astype(np.int64)
    rest = on_device(answers, device), on_device(lengths, device)
    return Batch(on_device(tokens, device), *rest, examples.offsets[indices].tolist())
