"""AsyncLLM: the texts of LLM, streamed in an event loop; no request is left running."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

import pytest

from paceline import LLM, AsyncLLM, RequestOutput, SamplingParams
from paceline.errors import BackendError, OverloadedError, RequestError, UnavailableError
from tests.toy import ENDLESS, ToyTokenizer, roomy_engine, toy_engine

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "python.md"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
UNTIL_ENDED = SamplingParams(temperature=0, max_tokens=ENDLESS, ignore_eos=True)
Result = TypeVar("Result")


def in_loop(work: Callable[[AsyncLLM], Awaitable[Result]], engine=None, max_queue: int = 100) -> Result:
    """The result of `work` with an AsyncLLM around a toy engine, which is closed afterwards."""

    async def main() -> Result:
        async with AsyncLLM.from_engine(engine or toy_engine(), ToyTokenizer(), max_queue) as llm:
            return await asyncio.wait_for(work(llm), 60)

    return asyncio.run(main())


async def every(outputs) -> list[RequestOutput]:
    return [output async for output in outputs]


def test_concurrent_requests_give_what_llm_gives():
    prompts = ["hello", "there", {"prompt_token_ids": [4, 5, 6]}]
    expected = LLM.from_engine(toy_engine(), ToyTokenizer()).generate(prompts, GREEDY)

    async def work(llm):
        return await asyncio.gather(*(every(llm.generate(prompt, GREEDY)) for prompt in prompts))

    for outputs, whole in zip(in_loop(work), expected, strict=True):
        last = outputs[-1]
        assert (last.prompt, last.prompt_token_ids, last.outputs) == (
            whole.prompt,
            whole.prompt_token_ids,
            whole.outputs,
        )
        assert last.metrics.finished_time is not None


def test_each_output_has_all_that_came_before():
    params = SamplingParams(n=2, seed=1, max_tokens=9, logprobs=1, ignore_eos=True)
    outputs = in_loop(lambda llm: every(llm.generate("hello", params, "mine")))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"mine"}
    assert {len(output.outputs) for output in outputs} == {2}
    last = outputs[-1].outputs
    for output in outputs:
        for part, whole in zip(output.outputs, last, strict=True):
            assert part.token_ids == whole.token_ids[: len(part.token_ids)]
            assert whole.text.startswith(part.text)
            assert len(part.logprobs or []) == len(part.token_ids)
    assert len(outputs) > 3


def test_a_conversation_goes_through_the_template():
    messages = [{"role": "user", "content": "hi"}]
    (expected,) = LLM.from_engine(toy_engine(), ToyTokenizer()).chat(messages, GREEDY)
    last = in_loop(lambda llm: every(llm.chat(messages, GREEDY)))[-1]
    assert (last.prompt, last.outputs) == (expected.prompt, expected.outputs)


def test_structured_outputs_hold():
    params = SamplingParams(seed=3, max_tokens=50, structured_outputs={"choice": ["ABBA", "AA"]})
    last = in_loop(lambda llm: every(llm.generate("hello", params)))[-1]
    assert last.outputs[0].text in ("ABBA", "AA")


def test_an_abort_by_id_ends_the_iteration_with_what_there_is():
    engine = roomy_engine()

    async def work(llm):
        outputs = []
        async for output in llm.generate("hello", UNTIL_ENDED, "mine"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort("mine")
        await llm.abort("mine")  # it has ended: nothing happens
        await every(llm.generate("next", GREEDY))
        assert not engine.has_unfinished
        return outputs

    last = in_loop(work, engine)[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert last.outputs[0].token_ids


@pytest.mark.parametrize("leave", ["close", "cancel"])
def test_leaving_the_iteration_aborts_the_request(leave):
    engine = roomy_engine()

    async def first(llm, came):
        async with aclosing(llm.generate("hello", UNTIL_ENDED)) as outputs:
            async for _ in outputs:
                came.set()
                if leave == "close":
                    break

    async def work(llm):
        came = asyncio.Event()
        task = asyncio.create_task(first(llm, came))
        await came.wait()
        if leave == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await every(llm.generate("next", GREEDY))  # the engine is free for others
        return engine.has_unfinished

    assert in_loop(work, engine) is False


def test_errors_are_those_of_the_engine():
    engine = toy_engine(max_num_seqs=1)

    async def work(llm):
        with pytest.raises(RequestError, match="must be a text that is not empty"):
            await every(llm.generate(""))
        with pytest.raises(RequestError, match="tokens and the context holds"):
            await every(llm.generate("x" * 5000))
        running = llm.generate("hello", UNTIL_ENDED, "mine")
        await anext(running)
        with pytest.raises(RequestError, match="'mine' is already running"):
            await every(llm.generate("hello", GREEDY, "mine"))
        await running.aclose()
        waiting = [asyncio.create_task(every(llm.generate("hello", GREEDY))) for _ in range(4)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert any(isinstance(result, OverloadedError) for result in results)
        engine.backend.fail_next = BackendError("the backend broke. Mend it.")
        with pytest.raises(BackendError, match="Mend it"):
            await every(llm.generate("hello", GREEDY))
        await llm.close()
        with pytest.raises(UnavailableError, match="this AsyncLLM is closed"):
            await every(llm.generate("hello", GREEDY))

    in_loop(work, engine, max_queue=1)


def test_one_that_was_never_used_closes():
    in_loop(lambda llm: asyncio.sleep(0))


@pytest.mark.real
def test_the_example_of_the_guide(capsys):
    page = PAGE.read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    exec(compile(program, str(PAGE), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == printed
