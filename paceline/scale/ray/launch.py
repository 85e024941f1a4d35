"""The replicas of each model, as one Serve application per model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.registry import load_checkpoint, load_tokenizer, resolve
from paceline.models.tokenizer import Tokenizer
from paceline.scale.options import ScaleOptions
from paceline.scale.ray.cluster import Resources, replica_resources
from paceline.serve.options import ServeOptions
from paceline.serve.routes.file import ModelEntry, RoutesFile

if TYPE_CHECKING:
    from paceline.scale.ray.deployment import ServeReplicas

APPLICATION = "paceline"  # name of the Serve application; with several models, followed by a model's name


@dataclass(frozen=True)
class RemoteModel:
    """A model that replicas run, as its ingress needs it."""

    names: tuple[str, ...]  # that clients may use; answers carry the first
    entry: ModelEntry
    tokenizer: Tokenizer
    replicas: ServeReplicas
    facts: Mapping[str, str] = field(default_factory=dict)  # besides what its replicas report
    application: str = ""  # that `launch` has launched


def load_tokenizers(declared: RoutesFile) -> list[Tokenizer]:
    """The tokenizer of each model. ConfigError if a model is missing, or its ranks cannot share it."""
    tokenizers = []
    for entry in declared.models.values():
        _check_ranks(entry.config)
        options = entry.config.model
        tokenizers.append(load_tokenizer(resolve(options.tokenizer or options.model)))
    return tokenizers


def launch(
    declared: RoutesFile,
    tokenizers: Sequence[Tokenizer],
    options: ServeOptions,
    scale: ScaleOptions,
    total: Mapping[str, float],
) -> list[RemoteModel]:
    """The models, with their replicas running on a cluster of `total` resources."""
    shares = replica_resources([entry.config.backend for entry in declared.models.values()], scale, total)
    launched: list[RemoteModel] = []
    for (names, entry), tokenizer, share in zip(declared.models.items(), tokenizers, shares, strict=True):
        name = APPLICATION if len(shares) == 1 else f"{APPLICATION}-{names[0]}"
        try:
            replicas = _launch(name, with_threads(entry.config, share), options, scale, share)
        except BaseException:
            remove(launched)
            raise
        facts = {"model_name": names[0]} if len(shares) > 1 else {}
        launched.append(RemoteModel(names, entry, tokenizer, replicas, facts, name))
    return launched


def with_threads(config: EngineConfig, share: Resources) -> EngineConfig:
    """The configuration of a replica that gets a share of a cluster."""
    if share.threads is None:
        return config
    return replace(config, backend=replace(config.backend, threads=share.threads))


def remove(models: Iterable[RemoteModel]) -> None:
    """Remove the replicas of launched models. Other applications of the cluster may be another server's."""
    from ray import serve

    for model in models:
        serve.delete(model.application)


def _launch(
    name: str, config: EngineConfig, options: ServeOptions, scale: ScaleOptions, share: Resources
) -> ServeReplicas:
    """The replicas of one model. ConfigError if they do not start."""
    from ray import serve

    from paceline.scale.ray.deployment import ServeReplicas, replica_application

    serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "WARNING"})
    if name in serve.status().applications:
        raise ConfigError(
            f"the cluster already runs an application named {name!r}. Use another cluster, or remove it with "
            "`serve shutdown`."
        )
    application = replica_application(config, options, scale, share.for_actor())
    try:
        handle = serve.run(application, name=name, route_prefix=None)
    except RuntimeError as error:
        reason = _last_line(serve.status().applications[name].deployments) or str(error)
        serve.delete(name)
        raise ConfigError(f"the replicas did not start: {reason}") from error
    return ServeReplicas(handle, scale.replica_timeout)


def _last_line(deployments: Mapping[str, Any]) -> str:
    """The end of what Serve says about deployments: the error that ended their last replica."""
    lines = [line for found in deployments.values() for line in found.message.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _check_ranks(config: EngineConfig) -> None:
    """ConfigError if the model cannot be shared by --tensor-parallel-size ranks."""
    if config.backend.tensor_parallel_size > 1:
        from paceline.models.transformer.tensor_parallel import check_size

        check_size(load_checkpoint(resolve(config.model.model)).config, config.backend.tensor_parallel_size)
