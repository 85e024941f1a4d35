"""Requests on replicas: the same answers as from one engine, also when replicas die, hang or differ."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline.core.params import SamplingParams
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.engine.frontend.client import EngineClient
from paceline.engine.outputs import RequestOutput
from paceline.errors import OverloadedError, RequestError, UnavailableError
from paceline.scale.remote.dispatch import MAX_FRUITLESS
from tests.engine.test_exactness import prompt
from tests.scale.fake import FakeReplica, Fleet
from tests.toy import toy_engine
from tests.toy_tokenizer import ToyTokenizer

TOKENIZER = ToyTokenizer()
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},  # without a seed: the ingress gives it one
    {"temperature": 0.9, "seed": 7, "logprobs": 2, "n": 3},
    {"temperature": 1, "seed": 8, "presence_penalty": 0.7, "stop": ["A", "BC"], "min_tokens": 5},
    {"temperature": 0.7, "seed": 9, "prompt_logprobs": 1, "logprobs": 0, "n": 2},
    {"temperature": 1, "seed": 10, "max_tokens": 3},
]
REQUESTS = [
    (prompt(number, 5 + 3 * number), SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **options}))
    for number, options in enumerate(OPTIONS)
]


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(), 60)

    asyncio.run(main())


def fleet(count: int = 2, **options: Any) -> Fleet:
    return Fleet(lambda: toy_engine(max_model_len=400), TOKENIZER, count, **options)


async def answers(engine: EngineClient) -> list[Any]:
    streams = [await engine.submit(ids, params, str(number)) for number, (ids, params) in enumerate(REQUESTS)]
    outputs = await asyncio.gather(*[stream.finished() for stream in streams])
    return [content(output) for output in outputs]


def content(output: RequestOutput) -> Any:
    """All that a user sees, without times and counts of drafts."""
    return (output.request_id, output.prompt_token_ids, output.prompt_logprobs, output.outputs)


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def truth() -> list[Any]:
    """What one engine in this process answers."""
    found: list[Any] = []

    async def main() -> None:
        engine = AsyncEngine(toy_engine(max_model_len=400), TOKENIZER, max_queue=100)
        engine.start()
        found.extend(await answers(engine))
        await engine.stop()

    run(main)
    return found


def test_replicas_answer_as_one_engine(truth: list[Any]) -> None:
    async def main() -> None:
        async with fleet() as there:
            assert await answers(there.engine) == truth
            assert all(replica.requests for replica in there.replicas.all)
            assert there.engine.num_resumed == 0
            assert there.engine.num_requests == 0

    run(main)


async def disturbed(there: Fleet, harm: Callable[[FakeReplica], Any], truth: list[Any]) -> None:
    """All requests, with one replica harmed once the ingress has some of its tokens."""
    asking = asyncio.create_task(answers(there.engine))
    first = there.replicas.all[0]

    def has_answered_in_part() -> bool:
        running = [request.prompt_token_ids for request in first.engine.unfinished]
        received = [request for request in there.engine.unfinished if request.num_output > 5]
        return any(request.prompt_token_ids in running for request in received)

    await wait_for(has_answered_in_part)
    harmed = harm(first)
    if harmed is not None:
        await harmed
    assert await asking == truth
    assert there.engine.num_resumed > 0
    assert any(request["resume"] for request in there.replicas.all[1].requests)


def test_a_replica_that_dies_is_not_seen_in_any_answer(truth: list[Any]) -> None:
    async def main() -> None:
        async with fleet() as there:
            await disturbed(there, lambda replica: replica.kill(), truth)
            assert there.engine.failure is None

    run(main)


def test_a_replica_that_hangs_is_not_seen_in_any_answer(truth: list[Any]) -> None:
    async def main() -> None:
        async with fleet(replica_timeout=1.0) as there:
            await disturbed(there, lambda replica: replica.hang(), truth)
            stream = await there.engine.submit([3, 4], SamplingParams(max_tokens=2), "later")
            await stream.finished()  # the hung replica is avoided, or given up if it is chosen

    run(main)


def test_a_replica_that_stops_hands_its_requests_over(truth: list[Any]) -> None:
    """As at a scale-down whose drain takes too long: the engine refuses what is left."""

    async def main() -> None:
        async with fleet() as there:
            await disturbed(there, lambda replica: replica.worker.stop(), truth)

    run(main)


def test_without_any_replica_requests_wait_for_the_next_one(truth: list[Any]) -> None:
    async def main() -> None:
        async with fleet(count=1) as there:
            asking = asyncio.create_task(answers(there.engine))
            await wait_for(lambda: any(r.num_output > 2 for r in there.engine.unfinished))
            await there.replicas.all[0].kill()
            await wait_for(lambda: not there.engine.links)
            assert not asking.done()
            there.replicas.add()
            assert await asking == truth

    run(main)


def test_a_request_that_kills_every_replica_fails_in_the_end() -> None:
    async def main() -> None:
        async with fleet(count=MAX_FRUITLESS + 3) as there:
            for replica in there.replicas.all:
                replica.worker._run = lambda *_, by=replica: by.kill()  # type: ignore
            stream = await there.engine.submit([3, 4], SamplingParams(max_tokens=2), "poison")
            with pytest.raises(UnavailableError, match="replicas in a row gave no token"):
                await stream.finished()
            assert len(there.replicas.alive) == 3

    run(main)


def test_weights_of_another_form_never_continue_an_answer(truth: list[Any]) -> None:
    async def main() -> None:
        async with fleet(count=1) as there:
            other = there.replicas.add(weights_id="other")
            await wait_for(lambda: len(there.engine.links) == 2)
            assert await answers(there.engine) == truth
            assert not other.requests  # pinned to the first weights
            long = SamplingParams(max_tokens=380, ignore_eos=True)
            stream = await there.engine.submit([3, 4], long, "cut")
            await wait_for(lambda: any(r.num_output > 2 for r in there.engine.unfinished))
            await there.replicas.all[0].kill()
            with pytest.raises(UnavailableError, match="other weights"):
                await stream.finished()
            later = await there.engine.submit([3, 4], SamplingParams(max_tokens=2), "later")
            await later.finished()  # an upgrade: no replica with the old weights is left

    run(main)


def test_an_upgrade_of_the_weights_ends_answers_with_those_that_they_began_with(truth: list[Any]) -> None:
    """Serve drains the old replica. What runs there ends there; what comes later gets the new weights."""

    async def main() -> None:
        async with fleet(count=1) as there:
            old = there.replicas.all[0]
            asking = asyncio.create_task(answers(there.engine))
            await wait_for(lambda: any(request.num_output > 5 for request in old.engine.unfinished))
            new = there.replicas.add(weights_id="new")
            await wait_for(lambda: len(there.engine.links) == 2)
            draining = asyncio.create_task(old.worker.drain(60))
            await wait_for(lambda: there.engine.links[old.name].draining)
            stream = await there.engine.submit([3, 4], SamplingParams(max_tokens=2), "later")
            await stream.finished()
            assert [request["prompt_token_ids"] for request in new.requests] == [[3, 4]]
            assert await asking == truth
            await draining

    run(main)


def test_an_abort_reaches_the_replica() -> None:
    async def main() -> None:
        async with fleet(count=1) as there:
            long = SamplingParams(max_tokens=380, ignore_eos=True)
            stream = await there.engine.submit([3, 4], long, "gone")
            replica = there.replicas.all[0]
            await wait_for(lambda: replica.engine.num_requests == 1)
            stream.abort()
            await wait_for(lambda: replica.engine.num_requests == 0)
            assert there.engine.num_requests == 0
            await wait_for(lambda: replica.worker.num_requests == 0)

    run(main)


def test_an_output_that_its_text_ends_at_the_ingress_is_ended_on_the_replica() -> None:
    async def main() -> None:
        async with fleet(count=1) as there:
            seen: list[str] = []

            def watch() -> Callable[[str], bool]:
                return lambda piece: seen.append(piece) or len(seen) == 3  # type: ignore[func-returns-value]

            params = SamplingParams(temperature=0, max_tokens=380, ignore_eos=True)
            stream = await there.engine.submit([3, 4], params, "watched", watch=watch)
            output = await stream.finished()
            assert output.outputs[0].finish_reason == "stop"
            assert len(output.outputs[0].token_ids) < 30
            await wait_for(lambda: there.replicas.all[0].engine.num_requests == 0)

    run(main)


def test_bad_requests_and_too_many_are_refused_at_the_ingress() -> None:
    async def main() -> None:
        async with fleet(count=1, max_queue=1) as there:
            with pytest.raises(RequestError, match="outside the vocabulary"):
                await there.engine.submit([1000], SamplingParams(), "bad")
            with pytest.raises(RequestError, match="does not exist"):
                await there.engine.submit([3], SamplingParams(speculative="magic"), "bad")
            assert not there.replicas.all[0].requests
            long = SamplingParams(max_tokens=380, ignore_eos=True)
            for number in range(there.engine.limits.max_num_seqs + 1):
                await there.engine.submit([3, 4], long, str(number))
            with pytest.raises(OverloadedError, match="Send the request again later"):
                await there.engine.submit([3, 4], long, "more")

    run(main)


def test_who_does_not_know_the_secret_is_no_replica() -> None:
    async def main() -> None:
        async with fleet(count=1) as there:
            address = there.engine._dispatcher.links._address
            reader, writer = await asyncio.open_connection(address.host, address.port)
            hello = b'[["wrong", "r9", "toy"]]'
            writer.write(len(hello).to_bytes(4, "little") + hello)
            assert await reader.read() == b""
            assert "r9" not in there.engine.links
            writer.close()

    run(main)
