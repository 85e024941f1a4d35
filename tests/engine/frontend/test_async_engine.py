"""AsyncEngine: the same text as the engine alone; no request is lost, left running or waited for forever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.engine.engine import Delta, Engine
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.engine.frontend.stream import Stream
from paceline.errors import OverloadedError, RequestError, UnavailableError
from tests.toy import ENDLESS, ToyTokenizer, drain, roomy_engine, toy_engine
from tests.toy_passes import BreakingToy, OneByOne

Result = TypeVar("Result")
LONG = SamplingParams(temperature=0.7, seed=3, max_tokens=200, ignore_eos=True)
UNTIL_ENDED = replace(LONG, max_tokens=ENDLESS)


def in_loop(
    work: Callable[[AsyncEngine], Awaitable[Result]], engine: Engine | None = None, max_queue: int = 100
) -> Result:
    """The result of `work` with a running engine, which is stopped afterwards."""

    async def main() -> Result:
        front = AsyncEngine(engine or toy_engine(), ToyTokenizer(), max_queue=max_queue)
        front.start()
        try:
            return await asyncio.wait_for(work(front), 60)
        finally:
            await front.stop()

    return asyncio.run(main())


async def text_of(stream: Stream) -> str:
    return "".join([update.text async for update in stream])


def test_streams_of_many_requests_are_what_the_engine_gives_each_alone() -> None:
    prompts = [[index + 2, index + 9, 40] for index in range(20)]
    params = [SamplingParams(temperature=0.9, seed=index, max_tokens=20 + index) for index in range(20)]
    expected = []
    for ids, own in zip(prompts, params, strict=True):
        engine = toy_engine()
        (request,) = engine.add_request(ids, own)
        drain(engine)
        expected.append((request.output_token_ids, request.detokenizer.text))

    async def work(front: AsyncEngine) -> list[tuple[list[int], str]]:
        streams = [
            await front.submit(ids, own, f"r{index}")
            for index, (ids, own) in enumerate(zip(prompts, params, strict=True))
        ]
        texts = await asyncio.gather(*map(text_of, streams))
        outputs = [stream.output for stream in streams]
        assert all(output is not None and output.finished for output in outputs)
        assert [output.outputs[0].text for output in outputs if output] == texts
        return [
            (output.outputs[0].token_ids, text) for output, text in zip(outputs, texts, strict=True) if output
        ]

    assert in_loop(work) == expected


def test_n_outputs_and_their_logprobs_come_in_one_stream() -> None:
    async def work(front: AsyncEngine) -> None:
        stream = await front.submit(
            [4, 5], SamplingParams(n=3, seed=1, max_tokens=9, logprobs=2, ignore_eos=True), "r"
        )
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for update in stream:
            assert update.logprobs is not None
            assert [next(iter(entry)) for entry in update.logprobs] == list(update.token_ids)
            tokens[update.index].extend(update.token_ids)
        assert stream.output is not None
        assert [output.token_ids for output in stream.output.outputs] == list(tokens.values())
        assert {output.finish_reason for output in stream.output.outputs} == {"length"}

    in_loop(work)


def test_a_stream_that_is_left_aborts_its_request() -> None:
    backend = OneByOne()
    engine = toy_engine(backend)

    async def work(front: AsyncEngine) -> None:
        async with await front.submit([4, 5], LONG, "left") as stream:
            backend.turn.release()
            async for _ in stream:
                break
        other = await_submit = asyncio.create_task(front.submit([7, 8], SamplingParams(max_tokens=2), "r"))
        for _ in range(4):  # one pass may have begun before the abort, two are the other's
            backend.turn.release()
        await (await await_submit).finished()
        assert other.done()

    in_loop(work, engine)
    assert backend.passes <= 4
    assert not engine.has_unfinished
    assert engine.kv.usage == 0


def test_a_cancelled_submit_leaves_nothing_behind() -> None:
    backend = OneByOne()
    engine = toy_engine(backend)

    async def work(front: AsyncEngine) -> None:
        first = await front.submit([4, 5], SamplingParams(max_tokens=1, ignore_eos=True), "first")
        task = asyncio.create_task(front.submit([4, 5], LONG, "second"))
        await asyncio.sleep(0)  # the engine is in the first one's pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):  # before that pass ends: none is released for the second
            await task
        for _ in range(3):
            backend.turn.release()
        await first.finished()
        await front.drain()
        assert front.num_requests == 0

    in_loop(work, engine)
    assert engine.kv.usage == 0


def test_a_refused_request_is_reported_and_the_others_continue() -> None:
    async def work(front: AsyncEngine) -> None:
        async with await front.submit([4, 5], UNTIL_ENDED, "good") as good:
            with pytest.raises(RequestError, match="outside the vocabulary"):
                await front.submit([10**6], LONG, "bad")
            with pytest.raises(RequestError, match="already running"):
                await front.submit([4], LONG, "good")
            good.take()
            async for update in good:
                assert update.token_ids
                break

    in_loop(work, roomy_engine())


def test_a_full_queue_refuses_and_takes_again_when_there_is_room() -> None:
    async def work(front: AsyncEngine) -> None:
        streams = [await front.submit([4, 5], UNTIL_ENDED, f"r{index}") for index in range(5)]
        with pytest.raises(OverloadedError, match="at most 5"):
            await front.submit([4, 5], LONG, "one too many")
        for stream in streams:
            stream.abort()
        await (await front.submit([4, 5], LONG, "now")).finished()

    in_loop(work, roomy_engine(max_num_seqs=2), max_queue=3)


def test_a_failed_pass_fails_its_own_requests_and_the_engine_lives() -> None:
    async def work(front: AsyncEngine) -> None:
        output = await (await front.submit([4, 5], LONG, "hit")).finished()
        assert output.outputs[0].finish_reason == "error"
        assert isinstance(output.outputs[0].error, MemoryError)
        assert front.failure is None
        after = await (await front.submit([4, 5], LONG, "after")).finished()
        assert after.outputs[0].finish_reason == "length"

    in_loop(work, toy_engine(BreakingToy(3)))


def test_a_dead_engine_fails_all_requests_with_the_reason() -> None:
    engine = toy_engine()

    def die() -> list[Delta]:
        raise ZeroDivisionError

    async def work(front: AsyncEngine) -> None:
        engine.step = die  # type: ignore[method-assign]
        with pytest.raises(UnavailableError, match="died"):
            await (await front.submit([4, 5], LONG, "r")).finished()
        assert front.failure is not None
        with pytest.raises(UnavailableError, match="restart"):
            await front.submit([4, 5], LONG, "late")
        await front.drain()  # there is no request to wait for

    in_loop(work, engine)


def test_drain_refuses_new_requests_and_finishes_the_others() -> None:
    async def work(front: AsyncEngine) -> None:
        stream = await front.submit([4, 5], LONG, "r")
        drained = asyncio.create_task(front.drain())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="stopping"):
            await front.submit([4, 5], LONG, "late")
        assert len((await stream.finished()).outputs[0].token_ids) == 200
        await drained

    in_loop(work)


def test_stop_ends_what_runs_with_an_error_and_closes_the_engine() -> None:
    engine = roomy_engine()
    closed = threading.Event()
    engine.close = closed.set  # type: ignore[method-assign]

    async def work(front: AsyncEngine) -> None:
        stream = await front.submit([4, 5], UNTIL_ENDED, "r")
        await front.stop()
        with pytest.raises(UnavailableError, match="stopping"):
            await stream.finished()

    in_loop(work, engine)
    assert closed.is_set()


def test_an_observer_sees_every_token_and_every_end() -> None:
    class Counts:
        tokens = 0
        failed = 0

        def __init__(self) -> None:
            self.gone: list[str | None] = []

        def step(self, stats: StepStats, deltas: Sequence[Delta]) -> None:
            assert stats.new_tokens == sum(len(delta.token_ids) for delta in deltas)
            self.tokens += stats.new_tokens
            self.failed += stats.failed

        def aborted(self, requests: Sequence[Request]) -> None:
            self.gone += [request.finish_reason for request in requests]

    seen: list[int] = []

    async def main() -> Counts:
        counts = Counts()
        engine = roomy_engine(BreakingToy(3))
        front = AsyncEngine(engine, ToyTokenizer(), max_queue=9, observers=(counts,))
        front.start()
        await (await front.submit([4, 5], LONG, "hit")).finished()
        await (await front.submit([4, 5], LONG, "whole")).finished()
        seen.append(counts.tokens)
        async with await front.submit([4, 5], replace(UNTIL_ENDED, n=2), "left"):
            pass
        await (await front.submit([4, 5], LONG, "after it")).finished()
        await front.stop()
        return counts

    counts = asyncio.run(main())
    assert seen == [2 + 200]
    assert counts.failed == 1
    assert counts.gone == ["abort", "abort"]
