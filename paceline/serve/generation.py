"""Generation: all the outputs that one HTTP request asks for, from one prompt or several."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from itertools import starmap

from starlette.requests import Request

from paceline.constrain.compiler import Grammar
from paceline.core.params import SamplingParams
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.outputs import RequestOutput
from paceline.engine.stream import Stream, Update
from paceline.serve.errors import FieldError
from paceline.serve.protocol import SamplingFields

_SEGMENT = re.compile(r"[\w.:/-]{1,64}", re.ASCII)  # what can be a label of a metric


class Generation:
    """The running outputs of a request, numbered prompt by prompt: those of prompt p from p * n on."""

    def __init__(self, num_outputs: int) -> None:
        self._n = num_outputs
        self._arrived = asyncio.Event()  # whichever stream it is for
        self._streams: dict[int, Stream] = {}  # by prompt

    @staticmethod
    async def start(
        engine: AsyncEngine,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        fields: SamplingFields,
        grammar: Grammar | None,
    ) -> Generation:
        """A generation whose prompts have all been accepted by the engine; if one is refused, none runs."""
        generation = Generation(params.n)
        request_id = request.state.request_id
        segment = segment_of(request, fields)
        # a key's salt is always of one length: no cache_salt of another key's client makes the same of both
        cache_salt = request.state.key_salt + (fields.cache_salt or "")
        request.state.record.note(generation, segment, fields.user)

        async def submit(number: int, prompt: Sequence[int]) -> None:
            generation._streams[number] = await engine.submit(
                prompt,
                params,
                f"{request_id}-{number}" if len(prompts) > 1 else request_id,
                segment=segment,
                cache_salt=cache_salt,
                grammar=grammar,
                arrived=generation._arrived,
            )

        try:  # all at once: they begin in the same pass
            results = await asyncio.gather(*starmap(submit, enumerate(prompts)), return_exceptions=True)
            for error in filter(None, results):
                raise error
        except BaseException:
            generation.abort()
            raise
        return generation

    @property
    def outputs(self) -> list[RequestOutput]:
        """The whole outputs of the prompts that have ended; of all, when the iteration is over."""
        outputs = [self._streams[number].output for number in sorted(self._streams)]
        return [output for output in outputs if output is not None]

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Update]]]:
        """What has come since the last time, as (number of the output, update). Raises an output's error."""
        while True:
            # asked first: updates come before the end
            ended = all(stream.output is not None for stream in self._streams.values())
            batch = [
                (number * self._n + update.index, update)
                for number, stream in self._streams.items()
                for update in stream.take()
            ]
            sound = [(index, update) for index, update in batch if update.error is None]
            if sound:
                yield sound
            for _, update in batch:
                if update.error is not None:  # after what came before it
                    raise update.error
            if batch:
                continue
            if ended:
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def finished(self) -> list[RequestOutput]:
        """The whole outputs, one for each prompt, when all are there."""
        async for _ in self:
            pass
        return self.outputs

    def abort(self) -> None:
        """End what still runs. It takes part in no further pass."""
        for stream in self._streams.values():
            stream.abort()


def segment_of(request: Request, fields: SamplingFields) -> str:
    """The kind of traffic a request says it is, in its body or by X-Segment; empty if it does not say."""
    segment = fields.segment or request.headers.get("x-segment", "")
    if segment and not _SEGMENT.fullmatch(segment):
        raise FieldError(
            "segment",
            f"a segment has 1 to 64 letters, digits, '_', '.', ':', '/' and '-', got {segment[:80]!r}.",
        )
    return segment
