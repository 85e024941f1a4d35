"""The models that a server loads, from a command line or a routes file, and their loading."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.backends.base import Backend
from paceline.build import Loaded, LoadedModel, build_engine, find_model, load_model
from paceline.config import DEFAULT_MODEL, CacheOptions, EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.models.tokenizer import Tokenizer
from paceline.serve.observability.logs import log_event
from paceline.serve.options import ServeOptions
from paceline.serve.routes.file import ModelEntry, RoutesFile, RouteTable, read_routes
from paceline.terminal.session import announce_compilation, note

logger = logging.getLogger(__name__)

LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")  # that the log of a start shows
WARM_TOKENS = 40  # length of the warm-up prompt: enough to run every kernel of a pass


@dataclass(frozen=True)
class ServedModel:
    """A loaded model with what its service needs."""

    names: tuple[str, ...]  # that clients may use; answers carry the first
    engine: Engine
    tokenizer: Tokenizer
    facts: Mapping[str, str]  # that describe it, for the metrics
    max_queue: int | None = None  # None: the server's
    tool_call_parser: str | None = None  # None: the server's
    loaded: Loaded | None = None  # what it was made from, to learn with it


def declared_models(
    model: str | None, engine: Mapping[str, Any], options: ServeOptions, together: bool = True
) -> RoutesFile:
    """The models and routes to serve: the model of a command line, or what its routes file declares.

    `engine` are the engine's options on the command line; a routes file may set others for each model.
    `together`: the models share the memory of one GPU.
    """
    if options.routes is None:
        name = model or DEFAULT_MODEL
        config = EngineConfig.from_options(model=name, lora_modules=options.lora_modules, **engine)
        names = with_adapters(model_names(name, options), config)
        return RoutesFile(RouteTable.of(*names), {names: ModelEntry(config)})
    if model is not None:
        raise ConfigError(
            f"the model {model!r} is given beside --routes, which declares the models: leave it out, or add "
            f"[models.NAME] with model = {model!r} to the file."
        )
    if options.lora_modules:
        raise ConfigError(
            "--lora-modules is given beside --routes, which cannot name adapters: leave it out."
        )
    if options.served_model_name:
        raise ConfigError("--served-model-name is given beside --routes, where each model has its name.")
    return read_routes(options.routes, engine, together)


def load_models(declared: RoutesFile) -> list[ServedModel]:
    """All models, loaded one after the other. On the CPU they share one team of threads."""
    for entry in declared.models.values():  # what is missing is reported before anything is loaded
        find_model(entry.config)
    served: list[ServedModel] = []
    for names, entry in declared.models.items():
        begun = time.monotonic()
        loaded = load(entry.config, served[0].engine.backend if served else None)
        facts = describe(entry.config, loaded)
        if len(declared.models) > 1:
            facts["model_name"] = names[0]
        announce(facts, time.monotonic() - begun)
        queue, parser = entry.max_queue, entry.tool_call_parser
        served.append(ServedModel(names, loaded.engine, loaded.tokenizer, facts, queue, parser, loaded))
    return served


def load(config: EngineConfig, beside: Backend | None = None) -> Loaded:
    """The loaded model (downloaded if necessary), with its kernels compiled.

    `beside` is the backend of another one, whose threads it shares: their steps take turns.
    """
    find_model(config)
    if config.backend.name == "cpu":
        announce_compilation()
    if sys.stderr.isatty():
        note(f"loading {config.model.model}")
    model = load_model(config, beside)
    warm_up(config, model)
    loaded = build_engine(config, model)
    loaded.engine.grammars.prepare()
    loaded.engine.prepare()
    return loaded


def warm_up(config: EngineConfig, model: LoadedModel) -> None:
    """Compile and run what passes and drafts need, in a separate engine: the real one stays untouched."""
    small = replace(
        config,
        model=replace(config.model, max_model_len=None),
        cache=CacheOptions(
            kv_cache_memory_bytes=16 * model.backend.bytes_per_page(), enable_prefix_caching=False
        ),
    )
    engine = build_engine(small, model).engine
    engine.compile_ahead()
    length = min(WARM_TOKENS, engine.limits.max_model_len - 3)
    requests: list[Request] = []
    for params in (
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        SamplingParams(top_p=0.9, top_k=20, seed=0, max_tokens=8, ignore_eos=True, logprobs=1),
    ):
        requests += engine.add_request([0] * length, params)
    while engine.has_unfinished:
        engine.step()
    for request in requests:  # what fails now would fail for every client
        if request.error is not None:
            raise request.error


def describe(config: EngineConfig, loaded: Loaded) -> dict[str, Any]:
    """What is served and how, for the log and the metrics."""
    limits = loaded.engine.limits
    return {
        "version": __version__,
        "model": Path(config.model.model).name,
        "backend": config.backend.name,
        "quantization": loaded.engine.backend.weight_format,
        "drafters": ",".join(loaded.drafters) or "off",
        "draft_control": "auto" if config.speculative.speculation().auto else "fixed",
        "max_model_len": str(limits.max_model_len),
        "max_num_seqs": str(limits.max_num_seqs),
        "max_num_batched_tokens": str(limits.max_num_batched_tokens),
    }


def announce(facts: Mapping[str, str], seconds: float) -> None:
    """Log the model and its drafters. `load_model` has logged the backend; the URL follows."""
    limits: dict[str, Any] = {name: facts[name] for name in LIMITS}
    log_event(logger, "model", name=facts["model"], **limits, seconds=round(seconds, 1))
    log_event(logger, "drafter", name=facts["drafters"], control=facts["draft_control"])


def with_adapters(names: tuple[str, ...], config: EngineConfig) -> tuple[str, ...]:
    """The names, and those of the model with each of its adapters."""
    return names + tuple(f"{name}:{adapter}" for name in names for adapter in config.model.adapters)


def model_names(model: str, options: ServeOptions) -> tuple[str, ...]:
    """Names that clients may use for the model. A file or folder gives its base name, never its path."""
    if options.served_model_name:
        return options.served_model_name
    path = Path(model).expanduser()
    return (path.resolve().name.removesuffix(".gguf") if path.exists() else model,)
