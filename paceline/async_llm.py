"""AsyncLLM: the engine for an event loop, with vLLM's names. Many requests at once, each streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from paceline.config import DEFAULT_MODEL
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.engine.frontend.stream import Stream, Update
from paceline.engine.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SpeculativeMetrics,
)
from paceline.errors import UnavailableError
from paceline.llm import Message, Prompt, python_config, tokenized, tokenized_chat
from paceline.models.chat import TemplateOptions

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

MAX_QUEUE = 256  # waiting requests


class AsyncEngineOwner:
    """What an AsyncLLM holds: an engine, its asynchronous front, and the streams of running requests."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, max_queue: int) -> None:
        self._engine = engine
        self._front = AsyncEngine(engine, tokenizer, max_queue=max_queue)
        self._tokenizer = tokenizer
        self._numbers = count()
        self._streams: dict[str, Stream] = {}
        self._started = self._closed = False


class AsyncLLM(AsyncEngineOwner):
    """A loaded model that generates text for an event loop.

        async with AsyncLLM("smollm2-135m") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    Requests of concurrent tasks share the engine's passes. Options are those of LLM; `max_queue` is the
    number of requests that may wait, more raise OverloadedError.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, max_queue: int = MAX_QUEUE, **options: Any) -> None:
        from paceline.build import build_engine

        loaded = build_engine(python_config(model, options))
        loaded.engine.prepare()
        super().__init__(loaded.engine, loaded.tokenizer, max_queue)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer, max_queue: int = MAX_QUEUE) -> AsyncLLM:
        """An AsyncLLM around an existing engine."""
        llm = cls.__new__(cls)
        AsyncEngineOwner.__init__(llm, engine, tokenizer, max_queue)
        return llm

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        segment: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output of a prompt after each step: all text and tokens so far; the last one has its metrics.

        Leaving the iteration, or cancelling the task that runs it, aborts the request. A request that fails
        raises its error.
        """
        prepare = partial(tokenized, prompt, self._tokenizer)
        return self._outputs(prepare, sampling_params, request_id, segment, cache_salt)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        segment: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same for a conversation."""
        options: TemplateOptions = {"add_generation_prompt": add_generation_prompt}
        prepare = partial(tokenized_chat, messages, self._tokenizer, tools, options)
        return self._outputs(prepare, sampling_params, request_id, segment, cache_salt)

    async def abort(self, request_id: str) -> None:
        """End a request before the next pass. Its iteration ends with what there is, and the finish_reason
        "abort". An id that is not running is ignored: the request may have just finished."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.abort()
            stream.fail(_Aborted())

    async def close(self) -> None:
        """Abort what runs, and save what persists. The AsyncLLM cannot be used afterwards."""
        self._closed = True
        if self._started:
            await self._front.stop()
        else:
            self._engine.close()

    async def _outputs(
        self,
        prepare: Callable[[], tuple[str | None, Sequence[int]]],
        params: SamplingParams | None,
        request_id: str | None,
        segment: str,
        cache_salt: str,
    ) -> AsyncGenerator[RequestOutput, None]:
        if self._closed:
            raise UnavailableError("this AsyncLLM is closed: make a new one.")
        if not self._started:  # here, because the engine's front belongs to a running event loop
            self._front.start()
            self._started = True
        params = params or SamplingParams()
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        arrival = time.perf_counter()
        with self._front.preparing():  # in threads: a long prompt or a large schema does not stop the loop
            text, ids = await asyncio.to_thread(prepare)
            structure = params.structure
            grammar = None if structure is None else await asyncio.to_thread(self._front.compile, structure)
        stream = await self._front.submit(
            ids, params, name, segment=segment, cache_salt=cache_salt, grammar=grammar
        )
        self._streams[name] = stream
        growing = _Growing(name, text, ids, arrival, params.n)
        try:
            async with stream:
                async for update in stream:
                    if update.error is not None:
                        raise update.error
                    growing.add(update)
                    if stream.output is None:
                        yield growing.output()
                assert stream.output is not None
                yield replace(stream.output, prompt=text)
        except _Aborted:
            growing.abort()
            yield growing.output()
        finally:
            self._streams.pop(name, None)


class _Aborted(Exception):
    """A request was aborted by its id."""


class _Growing:
    """The output of a running request, as far as it has come."""

    def __init__(self, name: str, prompt: str | None, ids: Sequence[int], arrival: float, n: int) -> None:
        self._name, self._prompt, self._ids = name, prompt, list(ids)
        self._metrics = RequestMetrics(arrival, None, None, None, 0, 0, SpeculativeMetrics())
        self._outputs = [CompletionOutput(index, "", [], None, None, None, None) for index in range(n)]

    def add(self, update: Update) -> None:
        before = self._outputs[update.index]
        logprobs = None if update.logprobs is None else [*(before.logprobs or []), *update.logprobs]
        self._outputs[update.index] = replace(
            before,
            text=before.text + update.text,
            token_ids=[*before.token_ids, *update.token_ids],
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            logprobs=logprobs,
        )

    def abort(self) -> None:
        self._outputs = [
            output if output.finish_reason else replace(output, finish_reason="abort")
            for output in self._outputs
        ]

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self._name,
            prompt=self._prompt,
            prompt_token_ids=self._ids,
            prompt_logprobs=None,
            outputs=list(self._outputs),
            finished=all(output.finish_reason for output in self._outputs),
            metrics=self._metrics,
        )
