"""/v1/models and /version: the served model and the server's version."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from paceline import __version__
from paceline.serve.openai.answers import ASKS, documented
from paceline.serve.routes.models import Models


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the model's first name; a virtual one's own
    parent: str | None  # the model that an adapter changes
    max_model_len: int  # tokens of prompt and output together


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Version(BaseModel):
    version: str


def router(served: Models) -> APIRouter:
    """The routes that describe the model."""
    routes = APIRouter()

    @routes.get("/v1/models", response_model=ModelList, responses=ASKS, tags=["OpenAI"])
    async def models() -> dict[str, Any]:
        """The names of the served models, virtual ones included."""
        return {"object": "list", "data": [_model(served, name) for name in served.table.names]}

    @routes.get(
        "/v1/models/{name:path}",
        response_model=Model,
        responses=documented(401, 404, 500, 503),
        tags=["OpenAI"],
    )
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        return _model(served, served.check(name))

    @routes.get("/version", response_model=Version, responses=ASKS, tags=["Server"])
    async def version() -> dict[str, Any]:
        """The version of this server."""
        return {"version": __version__}

    return routes


def _model(served: Models, name: str) -> dict[str, Any]:
    service = served.services.get(name)
    return {
        "id": name,
        "object": "model",
        "created": (service or served.default).created,
        "owned_by": "paceline",
        "root": name if service is None else service.model_names[0],
        "parent": name.rpartition(":")[0] if service is not None and service.adapter_of(name) else None,
        "max_model_len": served.max_model_len(name),
    }
