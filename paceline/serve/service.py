"""Service: what every endpoint uses of the served model, from its names and tokenizer to generations.

Whatever may take long (large bodies, templates, tokenizing, compiling grammars) runs in worker threads,
in pieces that hold the GIL for a few milliseconds at most.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ParamSpec, TypeAlias, TypeVar, Unpack

from starlette.requests import Request

from paceline import __version__
from paceline.constrain.compiler import Grammar
from paceline.core.params import SamplingParams
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.engine.admission import Limits, prompt_too_long
from paceline.engine.frontend.client import EngineClient
from paceline.engine.outputs import RequestOutput
from paceline.errors import OverloadedError
from paceline.learn.data.collector import Origin
from paceline.models.chat import TemplateOptions
from paceline.models.tokenizer import Tokenizer, TooManyTokens
from paceline.serve.http.errors import ClientGone
from paceline.serve.http.sse import disconnected
from paceline.serve.openai.generation import Generation, segment_of
from paceline.serve.openai.protocol import SamplingFields
from paceline.serve.tools.toolbox import NO_TOOLS, Toolbox, ToolPlan

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
OnFinished: TypeAlias = Callable[[RequestOutput, Origin], None]
Restrict: TypeAlias = Callable[[SamplingParams, Origin], SamplingParams]

WORKERS = 6  # threads for bodies, templates, tokenizing and grammars
COMPILERS = 2  # grammars compiled at a time
COMPILER_WAIT = 10.0  # seconds that a request waits for its turn to compile


def new_workers() -> ThreadPoolExecutor:
    """The worker threads of a server; all its models share them."""
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="paceline-serve")


@dataclass(frozen=True)
class Prepared:
    """A request as one model gets it."""

    prompts: list[list[int]]
    params: SamplingParams
    plan: ToolPlan = NO_TOOLS
    user_text: str | None = None  # of the user's messages; None: the prompts are what the user wrote
    warnings: list[str] = field(default_factory=list)  # what has no effect with this model


@dataclass
class Service:
    """One served model."""

    engine: EngineClient
    tokenizer: Tokenizer
    model_names: tuple[str, ...]  # names that clients may use; answers carry the first
    tool_call_parser: str | None = None  # None: chosen by the model's chat template
    created: int = field(default_factory=lambda: int(time.time()))
    on_finished: OnFinished | None = None  # gets every finished output, to learn from it
    restrict: Restrict | None = None  # the params with which a request runs
    workers: ThreadPoolExecutor = field(default_factory=new_workers)
    compilers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(COMPILERS))

    @property
    def limits(self) -> Limits:
        """Limits of the engine."""
        return self.engine.limits

    def adapter_of(self, name: str) -> str:
        """The adapter that a name of the model asks for; "": none."""
        base, _, adapter = name.rpartition(":")
        return adapter if base in self.model_names else ""

    @cached_property
    def toolbox(self) -> Toolbox:
        """Tool calling for this model."""
        return Toolbox(self.tokenizer, self.tool_call_parser)

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
        prepared: Prepared,
        fields: SamplingFields,
        needs_logprobs: bool = False,
        adapter: str = "",
    ) -> Generation:
        """A running generation. Pass it to `finished` or to an EventResponse; both end it.

        `needs_logprobs`: also if the client asked for none; then it is sent none.
        """
        params, plan = prepared.params, prepared.plan
        hidden = needs_logprobs and params.logprobs is None
        if hidden:
            params = replace(params, logprobs=0)
        grammar = None
        if params.structure is not None:
            grammar, warnings = await self._compile(plan, params.structure)
            request.state.record.warnings += warnings
        origin = Origin(
            params,
            segment_of(request, fields),
            fields.cache_salt or "",
            request.state.key_id,
            fields.store is not False,
        )
        if self.restrict is not None:
            params = self.restrict(params, origin)
        offer = None if adapter else self.on_finished  # the model itself is what is learned
        request.state.queue_slot.close()  # from here it counts in the engine's queue
        return await Generation.start(
            self.engine,
            request,
            prepared.prompts,
            params,
            fields,
            grammar,
            plan.watch,
            hidden,
            None if offer is None else lambda output: offer(output, origin),
            adapter,
        )

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
