"""Batches of about the same number of tokens, packed into one row, in an order fixed by the seed.

row          a a a b b b b c c c c c c       products over tokens take it as it is
groups       a a a .   c c c c c c           attention takes documents of similar length together
             b b b b
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ConfigError
from paceline.train.data.examples import Examples

Indices = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]
MAX_HELD_OUT = 512  # prompts
OPEN = 8  # batches that may still get an example
MAX_PADDED = 1.125  # tokens that attention pads a group of documents to, relative to their own
FREE_PADDING = 128  # tokens of a group that cost less than attention in two parts would


@dataclass(frozen=True)
class Group:
    """Neighbouring documents of a row, which attention pads to the length of the longest."""

    sizes: Sequence[int]  # of each document, in tokens or in blocks
    begin: int  # place of the first document in the row
    device: torch.device

    @cached_property
    def total(self) -> int:
        """Tokens of all documents."""
        return sum(self.sizes)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(self.sizes)

    @cached_property
    def _places(self) -> torch.Tensor:
        """Where each token is among those of the padded documents: int64 [tokens]."""
        starts = np.arange(len(self.sizes)) * self.longest
        return on_device(np.repeat(starts, self.sizes) + _places_within(self.sizes), self.device)

    def padded(self, row: torch.Tensor) -> torch.Tensor:
        """The documents [documents, longest, ...] of a packed row [1, tokens, ...], with zeros after each."""
        part = row[0, self.begin : self.begin + self.total]
        if self.total < len(self.sizes) * self.longest:
            empty = part.new_zeros(len(self.sizes) * self.longest, *part.shape[1:])
            part = empty.index_copy(0, self._places, part)
        return part.reshape(len(self.sizes), self.longest, *part.shape[1:])

    def packed(self, documents: torch.Tensor) -> torch.Tensor:
        """This group's part [1, tokens, ...] of a packed row, of padded documents."""
        flat = documents.flatten(0, 1)
        return (flat if len(flat) == self.total else flat.index_select(0, self._places))[None]


@dataclass(frozen=True)
class Batch:
    """Documents packed into one row, one after the other, without padding.

    Positions are those in a document, and attention never leaves it: see `groups`.
    """

    tokens: torch.Tensor  # int64 [1, tokens]
    sizes: Sequence[int]  # [documents] tokens of each
    answers: Sequence[int]  # [documents] index of its first answered token in each
    starts: Sequence[int] = ()  # place of each one's first token among those of all examples, if it has one

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @cached_property
    def begins(self) -> Sequence[int]:
        """Place of each document's first token in the row."""
        return [0, *accumulate(self.sizes)][:-1]

    @cached_property
    def bounds(self) -> torch.Tensor:
        """Places where documents begin, and the end of the last one: int32 [documents + 1]."""
        return on_device(np.cumsum([0, *self.sizes]).astype(np.int32), self.device)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(self.sizes)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Of each token in its document: int64 [tokens]."""
        return on_device(_places_within(self.sizes), self.device)

    @cached_property
    def ends(self) -> torch.Tensor:
        """Of each token, the place in the row where its document ends: int64 [tokens]."""
        return on_device(np.repeat(np.cumsum(self.sizes), self.sizes), self.device)

    @cached_property
    def since_answer(self) -> torch.Tensor:
        """Tokens from the first answered one of its document to each token: int64 [tokens]."""
        counts = _places_within(self.sizes) - np.repeat(self.answers, self.sizes)
        return on_device(counts, self.device)

    @cached_property
    def taught(self) -> torch.Tensor:
        """The places of answered tokens that another one follows: int64 [places]."""
        documents = zip(self.begins, self.answers, self.sizes, strict=True)
        parts = [np.arange(begin + answer, begin + size - 1) for begin, answer, size in documents]
        return on_device(np.concatenate(parts), self.device)

    @cached_property
    def groups(self) -> Sequence[Group]:
        """The documents in groups of about the same length, so that little of attention is padding."""
        groups: list[Group] = []
        first, begin = 0, 0
        for end in range(1, len(self.sizes) + 1):
            wider = self.sizes[first : end + 1]
            if end == len(self.sizes) or _is_too_wide(wider):
                groups.append(Group(self.sizes[first:end], begin, self.device))
                first, begin = end, begin + groups[-1].total
        return groups

    def part(self, documents: Sequence[int], first: int = 0) -> tuple[Batch, torch.Tensor]:
        """The tokens from `first` on of some documents as a batch, and their places in this one."""
        begins, sizes, answers = self.begins, self.sizes, self.answers
        places = [np.arange(begins[each] + first, begins[each] + sizes[each]) for each in documents]
        where = on_device(np.concatenate(places), self.device)
        starts = [self.starts[each] for each in documents] if self.starts else ()
        left = [sizes[each] - first for each in documents], [answers[each] - first for each in documents]
        return Batch(self.tokens[:, where], *left, starts), where


def _is_too_wide(sizes: Sequence[int]) -> bool:
    """Whether attention over documents of these sizes would be too much padding."""
    return max(sizes) * len(sizes) > MAX_PADDED * sum(sizes) + FREE_PADDING


def _places_within(sizes: Sequence[int]) -> Indices:
    """0, 1, ... for each of these sizes, one after the other."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - sizes, sizes)


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
    """Every chosen example once, in batches of at most `batch_tokens` tokens.

    With `shares` [examples], as often as that in the mean of all epochs. A longer example gets its own batch.
    An example goes into the first of a few open batches that has room for it.
    """
    generator = np.random.default_rng([seed, 2, epoch])
    order = generator.permutation(chosen if shares is None else _repeated(chosen, shares, generator))
    batches: list[list[int]] = []
    room: list[int] = []  # tokens that still fit into each of the last OPEN batches
    for index, length in zip(order.tolist(), examples.lengths[order].tolist(), strict=True):
        fitting = next((number for number, free in enumerate(room) if length <= free), len(room))
        if fitting == len(room):
            batches.append([])
            room = [*room, batch_tokens][-OPEN:]
            fitting = len(room) - 1
        batches[fitting - len(room)].append(index)
        room[fitting] -= length
    return [np.array(batches[number]) for number in generator.permutation(len(batches))]


def all_batches(
    examples: Examples, chosen: Indices, batch_tokens: int, seed: int, shares: Shares | None = None
) -> Iterator[Indices]:
    """Batches of one epoch after another, without end."""
    for epoch in count():
        yield from epoch_batches(examples, chosen, batch_tokens, seed, epoch, shares)


def on_device(array: npt.NDArray[np.integer[Any]], device: torch.device) -> torch.Tensor:
    """A copy on the device. A GPU does not stop for it: the host must be steps ahead to keep it busy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pack(
    sequences: Sequence[Sequence[int] | npt.NDArray[np.int32]],
    answers: Sequence[int],
    device: torch.device,
    starts: Sequence[int] = (),
) -> Batch:
    """The sequences as one batch, in this order."""
    tokens = np.concatenate(sequences).astype(np.int64)
    return Batch(on_device(tokens, device)[None], [len(each) for each in sequences], answers, starts)


def collate(examples: Examples, indices: Indices, device: torch.device) -> Batch:
    """The examples at these indices as one batch, the shortest first: neighbours are of similar length."""
    indices = indices[np.argsort(examples.lengths[indices], kind="stable")]
    sequences = [examples.ids(int(index)) for index in indices]
    answers, starts = examples.answers[indices].tolist(), examples.offsets[indices].tolist()
    return pack(sequences, answers, device, starts)
