"""The target answers prompts in batches; each is on disk before the next, so a kill loses at most one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import TypeVar

from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.llm import LLM
from paceline.train.data.examples import Example, ExampleWriter
from paceline.train.data.prompts import Prompt

Item = TypeVar("Item")


class Next(Enum):
    """What to do after a step of a batch."""

    GO_ON = "go on"
    CUT = "time is up: end all answers here"
    DROP = "stop: forget unfinished answers"


Watch = Callable[[int, int], Next]  # of (answers finished, tokens) of the batch so far


def patient(answers: int, tokens: int) -> Next:
    """A Watch that never stops the run."""
    return Next.GO_ON


class Answerer:
    """The target as it is served. Each answer depends only on its prompt and seed."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        max_tokens: int,
        watch: Watch = patient,
    ) -> list[list[int] | None]:
        """One answer per prompt, including its end-of-sequence token, of at most `max_tokens` tokens.

        The same arguments give the same answers, unless `watch`, asked after every step, cuts them short.
        None: no answer.
        """
        engine = self._llm.engine
        requests: list[Request] = []
        answers = tokens = 0
        try:
            for prompt, temperature, seed in zip(prompts, temperatures, seeds, strict=True):
                params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
                requests += engine.add_request(prompt, params)
            after = Next.GO_ON
            while answers < len(requests) and (after := watch(answers, tokens)) is Next.GO_ON:
                for delta in engine.step():
                    tokens += len(delta.token_ids)
                    answers += delta.request.finished
            usable = [request.finished or after is Next.CUT for request in requests]
            return [
                (request.output_token_ids or None) if use else None
                for request, use in zip(requests, usable, strict=True)
            ]
        finally:
            for request in requests:
                engine.abort(request.request_id)


def write_answers(
    prompts: Iterable[tuple[Prompt, list[int]]],
    answerer: Answerer,
    writer: ExampleWriter,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    batch_size: int,
    watch: Watch = patient,
) -> None:
    """Answer each prompt once per temperature, skipping what `writer` already has.

    If `watch` stops the run, no other batch begins.
    """
    wanted = (
        (f"{prompt.id}#{number}", prompt.segment, ids, temperature)
        for prompt, ids in prompts
        for number, temperature in enumerate(temperatures)
        if f"{prompt.id}#{number}" not in writer.done
    )
    for batch in batched(wanted, batch_size):
        example_ids, segments, prompt_ids, heats = zip(*batch, strict=True)
        seeds = [seed_of(seed, example) for example in example_ids]
        answers = answerer.answer(prompt_ids, heats, seeds, max_tokens, watch)
        writer.append(
            Example(example_id, segment, ids + answer, len(ids))
            for example_id, segment, ids, answer in zip(
                example_ids, segments, prompt_ids, answers, strict=True
            )
            if answer is not None
        )
        if watch(0, 0) is not Next.GO_ON:
            return


def seed_of(seed: int, name: str) -> int:
    """The seed of one answer. It depends on no other answer, so a resumed run samples the same."""
    return zlib.crc32(f"{seed} {name}".encode())


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of `size`; the last one may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
