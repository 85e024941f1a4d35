"""Generation: all outputs of one HTTP request, over its prompts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import starmap

from starlette.requests import Request

from paceline.constrain.compiler import Grammar
from paceline.core.detokenizer import Watch
from paceline.core.params import SamplingParams
from paceline.engine.frontend.client import EngineClient
from paceline.engine.frontend.stream import Stream, Update
from paceline.engine.outputs import CompletionOutput, RequestOutput
from paceline.serve.http.errors import FieldError
from paceline.serve.openai.protocol import SamplingFields

_SEGMENT = re.compile(r"[\w.:/-]{1,64}", re.ASCII)  # valid as a metric label


class Generation:
    """The running outputs of a request. Output i of prompt p has the number p * n + i."""

    def __init__(self, num_outputs: int, hide_logprobs: bool = False) -> None:
        """`hide_logprobs`: the client did not ask for them; only `outputs_with_logprobs` has them."""
        self._n = num_outputs
        self._hide_logprobs = hide_logprobs
        self._arrived = asyncio.Event()  # set when any of the streams has an update
        self._streams: dict[int, Stream] = {}  # by prompt

    @staticmethod
    async def start(
        engine: EngineClient,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        fields: SamplingFields,
        grammar: Grammar | None,
        watch: Callable[[], Watch] | None,
        hide_logprobs: bool = False,
        on_finished: Callable[[RequestOutput], None] | None = None,
        adapter: str = "",
    ) -> Generation:
        """A generation whose prompts the engine has all accepted. If it refuses one, none runs.

        `on_finished` is called for each prompt whose outputs have finished.
        """
        generation = Generation(params.n, hide_logprobs)
        request_id = request.state.request_id
        segment = segment_of(request, fields)
        # salts of keys have a fixed length, so no other key's cache_salt can lead to the same concatenation
        cache_salt = request.state.key_salt + (fields.cache_salt or "")
        request.state.record.note(generation, params, segment, fields.user)

        async def submit(number: int, prompt: Sequence[int]) -> None:
            generation._streams[number] = await engine.submit(
                prompt,
                params,
                f"{request_id}-{number}" if len(prompts) > 1 else request_id,
                segment=segment,
                cache_salt=cache_salt,
                adapter=adapter,
                session=fields.user,
                grammar=grammar,
                watch=watch,
                arrived=generation._arrived,
            )
            if on_finished is not None:
                generation._streams[number].when_finished(on_finished)

        try:  # concurrently, so that all prompts start in the same pass
            results = await asyncio.gather(*starmap(submit, enumerate(prompts)), return_exceptions=True)
            for error in filter(None, results):
                raise error
        except BaseException:
            generation.abort()
            raise
        return generation

    @property
    def outputs(self) -> list[RequestOutput]:
        """The finished outputs by prompt; complete once the iteration has ended."""
        if not self._hide_logprobs:
            return self.outputs_with_logprobs
        return [
            replace(output, outputs=[_without_logprobs(completion) for completion in output.outputs])
            for output in self.outputs_with_logprobs
        ]

    @property
    def outputs_with_logprobs(self) -> list[RequestOutput]:
        """The same, also with log-probabilities that the client did not ask for."""
        outputs = [self._streams[number].output for number in sorted(self._streams)]
        return [output for output in outputs if output is not None]

    @property
    def unavailable_drafter(self) -> str | None:
        """The drafter that was asked for and is not loaded, so that the engine's default drafts."""
        return next((stream.unavailable_drafter for stream in self._streams.values()), None)

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Update]]]:
        """Batches of (output number, update) as they arrive. Raises the first error of an output."""
        while True:
            # read before the updates: a stream's last update comes before its end
            ended = all(stream.output is not None for stream in self._streams.values())
            batch = [
                (number * self._n + update.index, self._shown(update))
                for number, stream in self._streams.items()
                for update in stream.take()
            ]
            sound = [(index, update) for index, update in batch if update.error is None]
            if sound:
                yield sound
            for _, update in batch:
                if update.error is not None:  # after the updates that arrived before it
                    raise update.error
            if batch:
                continue
            if ended:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def _shown(self, update: Update) -> Update:
        return replace(update, logprobs=None) if self._hide_logprobs else update

    async def ended(self) -> None:
        """Wait until all outputs have ended, and keep their updates: an iteration then has all at once."""
        while not all(stream.ended for stream in self._streams.values()):
            self._arrived.clear()
            await self._arrived.wait()

    async def finished(self) -> list[RequestOutput]:
        """The outputs of all prompts, once all have finished."""
        async for _ in self:
            pass
        return self.outputs

    def abort(self) -> None:
        """Abort the outputs that still run. They take part in no further pass."""
        for stream in self._streams.values():
            stream.abort()


def _without_logprobs(completion: CompletionOutput) -> CompletionOutput:
    return replace(completion, logprobs=None, cumulative_logprob=None)


def segment_of(request: Request, fields: SamplingFields) -> str:
    """The request's traffic segment, from its body or the X-Segment header; empty if neither has one."""
    segment = fields.segment or request.headers.get("x-segment", "")
    if segment and not _SEGMENT.fullmatch(segment):
        raise FieldError(
            "segment",
            f"a segment has 1 to 64 letters, digits, '_', '.', ':', '/' and '-', got {segment[:80]!r}.",
        )
    return segment
