"""Service: what every endpoint uses of the served model, from its names and tokenizer to generations.

Whatever may take long (large bodies, templates, tokenizing, compiling grammars) runs in worker threads,
in pieces that hold the GIL for a few milliseconds at most.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ParamSpec, TypeVar, Unpack

from starlette.requests import Request

from paceline import __version__
from paceline.constrain.compiler import Grammar
from paceline.core.params import SamplingParams
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.engine.admission import Limits, prompt_too_long
from paceline.engine.client import EngineClient
from paceline.engine.outputs import RequestOutput
from paceline.errors import OverloadedError
from paceline.models.chat import TemplateOptions
from paceline.models.tokenizer import Tokenizer, TooManyTokens
from paceline.serve.errors import ApiError, ClientGone
from paceline.serve.generation import Generation
from paceline.serve.protocol import SamplingFields
from paceline.serve.sse import disconnected
from paceline.serve.tools.toolbox import NO_TOOLS, Toolbox, ToolPlan

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

WORKERS = 6  # threads for bodies, templates, tokenizing and grammars
COMPILERS = 2  # grammars compiled at a time
COMPILER_WAIT = 10.0  # seconds that a request waits for its turn to compile
READERS = 2  # large bodies handled at a time
LARGE_BODY = 16 * 1024  # bytes; a smaller body is parsed within a few milliseconds, whatever it contains
MAX_WAITING_BYTES = 64 * 1024 * 1024  # of large bodies that wait for their turn; above this, 429


def is_large(size: int) -> bool:
    """Whether a body of `size` bytes is parsed in a worker thread."""
    return size > LARGE_BODY


@dataclass
class Service:
    """One served model."""

    engine: EngineClient
    tokenizer: Tokenizer
    model_names: tuple[str, ...]  # names that clients may use; answers carry the first
    tool_call_parser: str | None = None  # None: chosen by the model's chat template
    created: int = field(default_factory=lambda: int(time.time()))
    workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(WORKERS, thread_name_prefix="paceline-serve")
    )
    compilers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(COMPILERS))
    readers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READERS))
    reading: threading.Lock = field(default_factory=threading.Lock)  # held while a large body is parsed
    waiting_bytes: int = 0  # of large bodies that wait for their turn

    @property
    def limits(self) -> Limits:
        """Limits of the engine."""
        return self.engine.limits

    @cached_property
    def toolbox(self) -> Toolbox:
        """Tool calling for this model."""
        return Toolbox(self.tokenizer, self.tool_call_parser)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 if the request names another model."""
        if name is not None and name not in self.model_names:
            served = " or ".join(map(repr, self.model_names))
            message = f"the model {name[:200]!r} is not served here; use {served}."
            raise ApiError(404, message, "model", "model_not_found")
        return name or self.model_names[0]

    async def reserve_place(self, size: int) -> ExitStack:
        """A place in the engine's queue for a request with a body of `size` bytes, held until it is closed.

        It counts as one waiting request. Only READERS large bodies are handled at a time, so that small ones
        do not wait behind them. Raises OverloadedError if there is no room.
        """
        with ExitStack() as place:
            place.enter_context(self.engine.preparing())
            if is_large(size):
                if self.waiting_bytes and self.waiting_bytes + size > MAX_WAITING_BYTES:
                    raise OverloadedError(
                        "too many large bodies wait to be read. Send the request again later."
                    )
                self.waiting_bytes += size
                try:
                    await self.readers.acquire()
                finally:
                    self.waiting_bytes -= size
                place.callback(self.readers.release)
            return place.pop_all()

    async def in_thread(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        """The function's result, computed in a worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.workers, lambda: function(*args, **options))

    def encode(self, prompts: Sequence[str | list[int]], add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of prompts, each a text or already token ids. Call it in a worker thread."""
        return [
            self.encode_text(prompt, add_special_tokens)
            if isinstance(prompt, str)
            else self._check_length(prompt)
            for prompt in prompts
        ]

    def encode_text(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """The token ids of a text; RequestError if there are more than `most`, or than the context holds."""
        room = self.limits.max_model_len - 1
        try:
            return self.tokenizer.encode(text, add_special_tokens, room if most is None else most)
        except TooManyTokens as error:
            if most is None:
                raise prompt_too_long(error.count, self.limits, error.exact) from None
            raise

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        plan: ToolPlan = NO_TOOLS,
        **options: Unpack[TemplateOptions],
    ) -> str:
        """A conversation rendered by the model's chat template. Call it in a worker thread."""
        chat, tools = self.toolbox.conversation(messages, plan)
        return self.tokenizer.apply_chat_template(chat, tools=tools, **options)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        plan: ToolPlan = NO_TOOLS,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """The token ids of a conversation. Call it in a worker thread."""
        return self.encode_text(self.chat_text(messages, plan, **options), False)

    def _check_length(self, prompt: list[int]) -> list[int]:
        """The prompt, if it fits into the context. The engine checks the ids themselves."""
        if len(prompt) >= self.limits.max_model_len:
            raise prompt_too_long(len(prompt), self.limits)
        return prompt

    async def start(
        self,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        fields: SamplingFields,
        plan: ToolPlan = NO_TOOLS,
    ) -> Generation:
        """A running generation. Pass it to `finished` or to an EventResponse; both end it."""
        grammar = None
        if params.structure is not None:
            grammar, warnings = await self._compile(plan, params.structure)
            request.state.record.warnings += warnings
        request.state.place.close()  # from here it counts in the engine's queue
        return await Generation.start(self.engine, request, prompts, params, fields, grammar, plan.watch)

    async def _compile(
        self, plan: ToolPlan, structure: StructuredOutputsParams
    ) -> tuple[Grammar, Sequence[str]]:
        """The compiled grammar, and what it does not hold the answer to.

        OverloadedError if it has to wait longer than COMPILER_WAIT seconds.
        """
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
        """The finished outputs, for a client that does not stream; ClientGone if it disconnects meanwhile."""
        try:
            return await unless_gone(request, generation.finished())
        finally:
            generation.abort()

    def head(self, request: Request, prefix: str, kind: str, model: str) -> dict[str, Any]:
        """The first fields of every answer and of every chunk of a stream."""
        return {
            "id": f"{prefix}-{request.state.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": self.fingerprint,
        }

    @cached_property
    def fingerprint(self) -> str:
        """An id of this model and server version."""
        name = f"{self.model_names[0]} {self.limits.vocab_size} {__version__}"
        return "fp_" + hashlib.sha256(name.encode()).hexdigest()[:10]


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`; if the client disconnects, `work` is cancelled and ClientGone raised."""
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
