"""`/requests`: the requests that run or wait now, for the live page. No prompt and no answer is shown."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from paceline.core.request import Request, Status
from paceline.serve.engines import EngineGroup
from paceline.serve.http.middleware import REQUESTS


class RunningRequest(BaseModel):
    """One output of a request."""

    id: str
    index: int  # which of the request's n outputs
    segment: str
    state: Literal["waiting", "prefill", "decode"]
    drafter: str | None  # of its last draft; null: none yet
    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    tokens_per_second: float | None  # since its first token; null before the second
    age_seconds: float  # since it arrived


class RunningRequests(BaseModel):
    requests: list[RunningRequest]  # the oldest first


def router(engine: EngineGroup) -> APIRouter:
    """The route of the list."""
    routes = APIRouter(tags=["Server"])

    @routes.get(REQUESTS)
    async def requests() -> RunningRequests:
        """Requests that run or wait, without their texts."""
        now = engine.now()
        return RunningRequests(requests=[_described(request, now) for request in engine.unfinished])

    return routes


def _described(request: Request, now: float) -> RunningRequest:
    tokens, first = request.num_output, request.first_token_time
    speed = None
    if first is not None and tokens > 1:
        speed = round((tokens - 1) / max(now - first, 1e-6), 1)
    return RunningRequest(
        id=request.request_id,
        index=request.child,
        segment=request.segment,
        state=_state(request),
        drafter=request.speculative.last_drafter,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=tokens,
        max_output_tokens=request.max_output,
        tokens_per_second=speed,
        age_seconds=round(max(now - request.arrival_time, 0.0), 3),
    )


def _state(request: Request) -> Literal["waiting", "prefill", "decode"]:
    if request.status is Status.WAITING:
        return "waiting"
    return "decode" if request.num_output else "prefill"
