"""EngineClient: the interface of an engine that a server needs, wherever the engine runs. The name is vLLM's.

AsyncEngine runs it in this process, paceline.scale.remote.remote_engine.RemoteEngine on replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Unpack

from paceline.constrain.compiler import Grammar
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.engine.admission import Limits, RequestOptions
from paceline.engine.frontend.stream import Stream


class EngineClient(Protocol):
    """An engine behind an asyncio interface. See AsyncEngine for what each member gives."""

    @property
    def limits(self) -> Limits: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def draining(self) -> bool: ...

    @property
    def state(self) -> StepStats: ...

    @property
    def unfinished(self) -> list[Request]: ...

    @property
    def failure(self) -> str | None: ...

    @property
    def stuck(self) -> bool: ...

    def now(self) -> float: ...

    def compile(self, structure: StructuredOutputsParams, lenient: bool = False) -> Grammar: ...

    def preparing(self) -> AbstractContextManager[None]: ...

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        session: str | None = None,
        arrived: asyncio.Event | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...
