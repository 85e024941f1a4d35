"""`/health`: 200 while the server accepts requests; 503 if it is stopping or its engine is stuck or dead."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from paceline.engine.async_engine import AsyncEngine


class Health(BaseModel):
    status: Literal["ok", "draining", "stuck", "dead"]


def router(engine: AsyncEngine) -> APIRouter:
    """The route of the health check."""
    routes = APIRouter(tags=["server"])

    @routes.get("/health", responses={503: {"model": Health, "description": "Stopping, stuck, or dead."}})
    async def health(response: Response) -> Health:
        """Whether requests are taken."""
        status = health_of(engine)
        response.status_code = 200 if status.status == "ok" else 503
        return status

    return routes


def health_of(engine: AsyncEngine) -> Health:
    """The engine's health."""
    if engine.failure is not None:
        return Health(status="stuck" if engine.stuck else "dead")
    return Health(status="draining" if engine.draining else "ok")
