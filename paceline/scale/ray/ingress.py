"""The HTTP API as a Serve deployment, for clusters without a `paceline serve` process in front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields
from typing import Any

from paceline.config import EngineConfig, option_names
from paceline.errors import ConfigError
from paceline.models.registry import load_tokenizer, resolve
from paceline.options import unknown_option
from paceline.scale.command import check_alone, make_ingress
from paceline.scale.options import ScaleOptions
from paceline.scale.pages import pages
from paceline.scale.ray import calls
from paceline.scale.ray.cluster import import_ray, machine_resources, replica_resources
from paceline.scale.ray.launch import RemoteModel, with_threads
from paceline.serve.http.app import make_app
from paceline.serve.loading import model_names, with_adapters
from paceline.serve.observability.logs import set_up_logs
from paceline.serve.options import ServeOptions
from paceline.serve.routes.file import ModelEntry
from paceline.serve.service import Service

OptionGroups = tuple[dict[str, Any], ServeOptions, ScaleOptions]


def split_options(options: Mapping[str, Any]) -> OptionGroups:
    """The options of engine, server and replicas. ConfigError for an unknown one."""
    server_names = {item.name for item in fields(ServeOptions)}
    scale_names = {item.name for item in fields(ScaleOptions)}
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    scale: dict[str, Any] = {}
    for name, value in options.items():
        if name in scale_names:
            scale[name] = value
        elif name in server_names:
            server[name] = value
        elif name in option_names():
            engine[name] = value
        else:
            known = [*option_names(), *server_names, *scale_names]
            raise ConfigError(unknown_option(name, known, "a deployment"))
    made = ServeOptions.from_flags(server)
    check_alone(made)
    if made.routes is not None:
        raise ConfigError(
            "--routes is for `paceline serve`: leave it out, or deploy an application for each model."
        )
    return engine, made, ScaleOptions(**scale)


def make_application(model: str, options: Mapping[str, Any]) -> Any:
    """The application of replicas and ingress. ConfigError before anything is loaded."""
    ray = import_ray()
    from paceline.scale.ray.deployment import replica_application

    engine, server, scale = split_options(options)
    config = EngineConfig.from_options(model=model, lora_modules=server.lora_modules, **engine)
    total = ray.cluster_resources() if ray.is_initialized() else machine_resources()
    (share,) = replica_resources([config.backend], scale, total)
    config = with_threads(config, share)
    replicas = replica_application(config, server, scale, share.for_actor())
    made = ray.serve.deployment(ray.serve.ingress()(Ingress)).options(
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=server.max_connections,
        graceful_shutdown_timeout_s=server.drain_timeout,
        ray_actor_options={"num_cpus": 0},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    names = with_adapters(model_names(model, server), config)
    return made.bind(replicas, names, config, server, scale)


class Ingress:
    """The HTTP API over a handle to the replicas."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        handle: Any,
        names: tuple[str, ...],
        config: EngineConfig,
        options: ServeOptions,
        scale: ScaleOptions,
    ) -> None:
        import ray

        from paceline.scale.ray.deployment import ServeReplicas

        set_up_logs(options.log_level, "json")
        source = config.model.tokenizer or config.model.model
        tokenizer = await asyncio.to_thread(lambda: load_tokenizer(resolve(source)))
        model = RemoteModel(
            names, ModelEntry(config), tokenizer, ServeReplicas(handle, scale.replica_timeout)
        )
        fleet = await make_ingress(model, options, scale, ray.util.get_node_ip_address())
        service = Service(fleet.engine, tokenizer, names, options.tool_call_parser)
        shown = pages([fleet], options.metrics_prefix)
        self.http_app = make_app(service, options, fleet.own, (), shown)

    async def post(self, path: str, body: Mapping[str, Any], api_key: str | None = None) -> dict[str, Any]:
        """For other deployments: the answer to a POST, routed like one of an HTTP client."""
        return await calls.post(self.http_app, path, body, api_key)

    async def stream(
        self, path: str, body: Mapping[str, Any], api_key: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """For other deployments, with `handle.options(stream=True)`: the chunks of a streamed answer."""
        async for chunk in calls.stream(self.http_app, path, body, api_key):
            yield chunk

    def __serve_build_asgi_app__(self) -> Any:
        """For Serve: the app, once this is initialized."""
        return self.http_app
