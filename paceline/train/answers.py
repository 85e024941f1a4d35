"""The target answers prompts in batches; each is on disk before the next, so a kill loses at most one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from paceline.train.examples import Example, ExampleWriter
from paceline.train.prompts import Prompt

Item = TypeVar("Item")


class Answerer(Protocol):
    """A target that answers prompts."""

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        max_tokens: int,
    ) -> list[list[int]]:
        """One answer per prompt, including its end-of-sequence token, of at most `max_tokens` tokens.

        The same arguments give the same answers.
        """
        ...


def write_answers(
    prompts: Iterable[tuple[Prompt, list[int]]],
    answerer: Answerer,
    writer: ExampleWriter,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    batch_size: int,
    on_batch: Callable[[ExampleWriter], bool] = lambda writer: True,
) -> None:
    """Answer each prompt once per temperature, skipping what `writer` already has.

    After every batch, `on_batch` returns whether to continue.
    """
    wanted = (
        (f"{prompt.id}#{number}", prompt.segment, ids, temperature)
        for prompt, ids in prompts
        for number, temperature in enumerate(temperatures)
        if f"{prompt.id}#{number}" not in writer.done
    )
    for batch in batched(wanted, batch_size):
        example_ids, segments, prompt_ids, heats = zip(*batch, strict=True)
        answers = answerer.answer(
            prompt_ids, heats, [seed_of(seed, example) for example in example_ids], max_tokens
        )
        writer.append(
            Example(example_id, segment, ids + answer, len(ids))
            for example_id, segment, ids, answer in zip(
                example_ids, segments, prompt_ids, answers, strict=True
            )
        )
        if not on_batch(writer):
            return


def seed_of(seed: int, name: str) -> int:
    """The seed of one answer. It depends on no other answer, so a resumed run samples the same."""
    return zlib.crc32(f"{seed} {name}".encode())


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of `size`; the last one may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
