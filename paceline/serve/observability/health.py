"""`/health` and `/ping`: 200 while the server accepts requests; 503 if it is stopping or its engine is stuck
or dead. `/load`: how many requests it has."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from paceline.serve.engines import EngineGroup
from paceline.serve.http.middleware import HEALTH, LOAD, PING
from paceline.serve.openai.answers import ASKS


class Health(BaseModel):
    status: Literal["ok", "draining", "stuck", "dead"]


class Load(BaseModel):
    server_load: int  # outputs that wait or are being generated


_UNWELL: dict[int | str, dict[str, Any]] = {
    503: {"model": Health, "description": "Stopping, stuck, or dead."}
}


def router(engine: EngineGroup) -> APIRouter:
    """The routes of health checks and of the load."""
    routes = APIRouter(tags=["Server"])

    @routes.get(HEALTH, responses=_UNWELL)
    @routes.get(PING, responses=_UNWELL, description="`/health` by SageMaker's name.")
    @routes.post(PING, responses=_UNWELL, include_in_schema=False)
    async def health(response: Response) -> Health:
        """Whether requests are taken."""
        status = health_of(engine)
        response.status_code = 200 if status.status == "ok" else 503
        return status

    @routes.get(LOAD, responses=ASKS)
    async def load() -> Load:
        """How busy the server is, for a load balancer."""
        return Load(server_load=engine.num_requests)

    return routes


def health_of(engine: EngineGroup) -> Health:
    """The health of the engines: that of the worst."""
    if engine.failure is not None:
        return Health(status="dead" if engine.dead else "stuck")
    return Health(status="draining" if engine.draining else "ok")
