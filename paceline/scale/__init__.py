"""Several replicas as one server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["application", "deployment"]


def deployment(model: str = "smollm2-135m", **options: Any) -> Application:
    """A Serve application: the whole server of a model, to run or to compose with others.

    The options are those of `paceline serve`: `deployment("smollm2-135m", replicas=2, threads=1)`.
    """
    from paceline.scale.ray.ingress import make_application

    return make_application(model, options)


def application(args: dict[str, Any]) -> Application:
    """The same for `serve deploy`, whose file has the options as `args`: see `paceline scale config`."""
    return deployment(**args)
