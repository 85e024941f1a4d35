"""What every endpoint works with: the model's names, its tokenizer, and the way from a prompt to a stream.

Whatever may take long (templates, tokenizing, compiling grammars) runs in threads beside the event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from paceline.engine.admission import Limits
from paceline.engine.async_engine import AsyncEngine, Stream
from paceline.engine.outputs import RequestOutput
from paceline.errors import RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.serve.errors import ApiError
from paceline.serve.protocol import SamplingFields
from paceline.verify.params import SamplingParams

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

WORKERS = 2  # threads for templates, tokenizing and grammars
COMPILE_SECONDS = 10.0  # a grammar that takes longer is refused


class ClientGone(Exception):
    """The client has closed the connection: nobody waits for an answer."""


@dataclass
class Service:
    """One served model."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    model_names: tuple[str, ...]  # what clients may call it; answers use the first
    created: int = field(default_factory=lambda: int(time.time()))
    workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(WORKERS, thread_name_prefix="paceline-serve")
    )

    @property
    def limits(self) -> Limits:
        """What the engine can take."""
        return self.engine.limits

    def check_model(self, name: str | None) -> str:
        """The name to answer with, if the request means this model (or does not say which)."""
        if name is not None and name not in self.model_names:
            served = " or ".join(map(repr, self.model_names))
            message = f"the model {name[:200]!r} is not served here; use {served}."
            raise ApiError(404, message, "model", "model_not_found")
        return name or self.model_names[0]

    async def in_thread(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        """The function's result, computed beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.workers, lambda: function(*args, **options))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        if not text:
            raise RequestError("the prompt is empty: give at least one token (a text, or token ids).")
        return await self.in_thread(self.tokenizer.encode, text, add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids of a conversation, by the model's own template."""

        def encode() -> list[int]:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt, tools)
            return self.tokenizer.encode(text, add_special_tokens=False)

        return await self.in_thread(encode)

    async def start(
        self, request: Request, ids: Sequence[int], params: SamplingParams, fields: SamplingFields
    ) -> Stream:
        """The running generation of a request. Use it with `async with`, so that leaving it aborts it."""
        return await self.engine.submit(
            ids,
            params,
            request.state.request_id,
            segment=fields.segment or request.headers.get("x-segment", ""),
            cache_salt=fields.cache_salt or "",
        )

    async def finished(self, request: Request, stream: Stream) -> RequestOutput:
        """The whole output, for a client that does not stream; ClientGone if it does not wait for it."""
        output = await unless_gone(request, stream.finished())
        for one in output.outputs:
            if one.error is not None:
                raise one.error
        return output


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled with ClientGone when the client closes the connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
