"""What every endpoint works with: the model's names, its tokenizer, and the way from a prompt to a stream.

Whatever may take long (templates, tokenizing, compiling grammars) runs in threads beside the event
loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from paceline import __version__
from paceline.constrain.compiler import Grammar
from paceline.constrain.params import StructuredOutputsParams
from paceline.engine.admission import Limits
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.outputs import RequestOutput
from paceline.errors import OverloadedError, RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.serve.errors import ApiError, ClientGone
from paceline.serve.generation import Generation
from paceline.serve.protocol import SamplingFields
from paceline.serve.sse import disconnected
from paceline.serve.tools.toolbox import NO_TOOLS, Toolbox, ToolPlan
from paceline.verify.params import SamplingParams

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

WORKERS = 4  # threads for templates, tokenizing and grammars
COMPILERS = 2  # of them that may be busy with grammars
COMPILER_WAIT = 10.0  # seconds that a request waits for one of them
MOST_CHARACTERS = 256  # of a token: a text with more for each token of the context cannot fit


@dataclass
class Service:
    """One served model."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    model_names: tuple[str, ...]  # what clients may call it; answers use the first
    tool_call_parser: str | None = None  # None: by the model's chat template
    created: int = field(default_factory=lambda: int(time.time()))
    workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(WORKERS, thread_name_prefix="paceline-serve")
    )
    compilers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(COMPILERS))

    @property
    def limits(self) -> Limits:
        """What the engine can take."""
        return self.engine.limits

    @cached_property
    def toolbox(self) -> Toolbox:
        """Tool calling as this model does it."""
        return Toolbox(self.tokenizer, self.tool_call_parser)

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

    async def encode(
        self, prompts: Sequence[str | list[int]], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """The token ids of prompts, of which some may be token ids already."""

        def encode() -> list[list[int]]:
            return [
                self._encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]

        return await self.in_thread(encode)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        plan: ToolPlan = NO_TOOLS,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids of a conversation, by the model's own template."""

        def encode() -> list[int]:
            chat, tools = self.toolbox.conversation(messages, plan)
            text = self.tokenizer.apply_chat_template(chat, add_generation_prompt, tools)
            return self._encode(text, add_special_tokens=False)

        return await self.in_thread(encode)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text; of one that is far too long nobody needs them."""
        most = self.limits.max_model_len * MOST_CHARACTERS
        if len(text) > most:
            raise RequestError(
                f"the prompt has {len(text)} characters, and the context of {self.limits.max_model_len} "
                f"tokens holds at most {most}. Shorten the prompt."
            )
        return self.tokenizer.encode(text, add_special_tokens)

    async def start(
        self,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        fields: SamplingFields,
        plan: ToolPlan = NO_TOOLS,
    ) -> Generation:
        """The running generation of a request. Hand it to `finished` or to an EventResponse, which end it."""
        grammar = None
        if params.structure is not None:
            grammar = await self._compile(plan, params.structure)
        return await Generation.start(self.engine, request, prompts, params, fields, grammar)

    async def _compile(self, plan: ToolPlan, structure: StructuredOutputsParams) -> Grammar:
        """The request's grammar; OverloadedError if those of other requests take too long."""
        try:
            async with asyncio.timeout(COMPILER_WAIT):
                await self.compilers.acquire()
        except TimeoutError:
            message = "grammars of other requests are being compiled. Send the request again later."
            raise OverloadedError(message) from None
        try:
            return await self.in_thread(plan.compile, self.engine.compile, structure)
        finally:
            self.compilers.release()

    async def finished(self, request: Request, generation: Generation) -> list[RequestOutput]:
        """The whole outputs, for a client that does not stream; ClientGone if it does not wait for them."""
        try:
            return await unless_gone(request, generation.finished())
        finally:
            generation.abort()

    def head(self, request: Request, prefix: str, kind: str, model: str) -> dict[str, Any]:
        """What every answer begins with, and every chunk of a stream."""
        return {
            "id": f"{prefix}-{request.state.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": self.fingerprint,
        }

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same model and version of this server."""
        name = f"{self.model_names[0]} {self.limits.vocab_size} {__version__}"
        return "fp_" + hashlib.sha256(name.encode()).hexdigest()[:10]


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled with ClientGone when the client closes the connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
