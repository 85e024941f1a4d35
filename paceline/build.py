"""The composition root: from a configuration to an engine. Several engines can share one model's weights."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.backends.base import Backend
from paceline.backends.load import load_backend
from paceline.config import EngineConfig, SpeculativeOptions
from paceline.control.auto import AutoController
from paceline.control.config import CONFIG
from paceline.control.controller import Controller, FixedController
from paceline.control.cost.measure import step_costs
from paceline.control.decision import DecisionLog
from paceline.control.memory import Memory
from paceline.control.planner.arms import device_arms, prior_acceptance
from paceline.control.planner.device import DevicePlanner
from paceline.core.arrays import Float32Array
from paceline.core.trees import DraftPlan
from paceline.draft.base import Drafter, Target, UnboundDrafter, drafts_on_device
from paceline.draft.methods import METHODS, find_files, load_drafter
from paceline.draft.on_demand import OnDemandDrafter
from paceline.draft.speculative_config import Speculation, parse_plan
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine, target_cache
from paceline.errors import ConfigError
from paceline.kv.cache import KVCache
from paceline.kv.sizing import CacheSize, PageBytes, available_memory, check_memory_limit, size_cache
from paceline.kv.states import states_memory
from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.config import ModelConfig
from paceline.models.heads.fingerprint import target_fingerprint
from paceline.models.heads.shipped import default_method, known_drafts
from paceline.models.lora import load_adapter
from paceline.models.registry import load_checkpoint, load_tokenizer, load_with_tokenizer, resolve
from paceline.models.tokenizer import Tokenizer
from paceline.verify.rules import RULES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model's weights in a backend, with its tokenizer: what several engines can share."""

    backend: Backend
    tokenizer: Tokenizer
    config: ModelConfig
    fingerprint: str = ""  # of the weights; draft heads name their target model by it
    final_norm: Float32Array | None = None  # [hidden] weight of the last norm, for draft heads
    mtp: Mapping[str, Tensor] = field(default_factory=dict)  # tensors of an MTP head in the checkpoint

    @staticmethod
    def of(checkpoint: Checkpoint, backend: Backend, tokenizer: Tokenizer) -> LoadedModel:
        """The model of a checkpoint whose weights the backend has."""
        norm = checkpoint.tensors["model.norm.weight"].float32()
        fingerprint = target_fingerprint(checkpoint)
        return LoadedModel(backend, tokenizer, checkpoint.config, fingerprint, norm, checkpoint.mtp)


@dataclass(frozen=True)
class Loaded:
    """An engine with its tokenizer and configuration."""

    engine: Engine
    tokenizer: Tokenizer
    model_config: ModelConfig
    drafters: Mapping[str, Drafter] = field(default_factory=dict)  # by method, the default first
    fingerprint: str = ""  # of the weights
    target: Target | None = None  # what drafters see of the model
    speculation: Speculation | None = None

    def load_head(self, method: str, path: Path) -> UnboundDrafter:
        """An unbound drafter with the head in this folder, for Engine.replace_head. Any thread may call this.

        The other options of the method are those of the running one. PacelineError if it cannot be loaded.
        """
        configured = None if self.speculation is None else self.speculation.drafters.get(method)
        if self.target is None or configured is None or "model" not in vars(configured.options):
            raise ConfigError(f"the method {method} is not configured, or reads no head: use eagle3.")
        options = replace(configured.options, model=str(path))
        return load_drafter(method, replace(configured, options=options), self.target)


def find_model(config: EngineConfig) -> Path:
    """The file or folder of the model, fetched if needed.

    PacelineError if the model, a head or a draft model is not there: what is missing is reported before the
    model loads, which can take minutes.
    """
    path = resolve(config.model.model)
    find_files(config.speculative.speculation().drafters)
    return path


def load_model(config: EngineConfig, beside: Backend | None = None) -> LoadedModel:
    """The model, tokenizer and backend of a configuration.

    `beside` is a loaded backend whose passes take turns with those of this one.
    """
    path = find_model(config)
    check_memory_limit(path, config.backend.threads or os.cpu_count() or 1)
    if config.model.tokenizer:
        checkpoint, tokenizer = load_checkpoint(path), load_tokenizer(resolve(config.model.tokenizer))
    else:
        checkpoint, tokenizer = load_with_tokenizer(path)
    served = checkpoint.config.for_context(config.model.max_model_len)
    checkpoint = replace(checkpoint, config=served)
    adapters = [
        load_adapter(name, folder, checkpoint.config) for name, folder in config.model.adapters.items()
    ]
    rows = config.max_num_batched_tokens
    backend = load_backend(checkpoint, config.backend, rows, beside, adapters)
    choice = config.backend.choice
    logger.info(
        "backend: %s on %s, %s weights (%s)", choice.name, choice.device, backend.weight_format, choice.why
    )
    return LoadedModel.of(checkpoint, backend, tokenizer)


def build_engine(
    config: EngineConfig,
    model: LoadedModel | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Loaded:
    """The configured engine, around `model` or around the model that the configuration names.

    Engines that share a model take turns: each finishes its pass before another starts one.
    """
    model = model or load_model(config)
    backend, tokenizer = model.backend, model.tokenizer
    speculation = _speculation(config, model)
    target = Target(
        config=model.config,
        tokenizer=tokenizer,
        backend=config.backend,
        loaded=backend,
        max_rows=config.max_num_batched_tokens,
        sampling=speculation.sampling,
        fingerprint=model.fingerprint,
        final_norm=model.final_norm,
        mtp=model.mtp,
    )
    unbound = {
        name: load_drafter(name, configured, target) for name, configured in speculation.drafters.items()
    }
    size = _cache_size(config, model, speculation, unbound)
    limits = Limits(
        model.config.vocab_size,
        size.max_model_len,
        config.scheduler.max_num_seqs,
        config.max_num_batched_tokens,
        draft_trees=RULES[speculation.rule].trees,
    )
    caching = config.cache.enable_prefix_caching
    kv = target_cache(backend, limits, size.num_pages, caching, size.num_window_pages)
    drafters = {name: drafter.bind(kv) for name, drafter in unbound.items()}
    on_demand = _on_demand(config, speculation, target, kv)
    plans = {name: configured.plan for name, configured in speculation.drafters.items()}
    engine = Engine(
        backend,
        tokenizer,
        limits,
        kv,
        seed=config.seed,
        controller=_controller(config, model, speculation, drafters),
        drafters={**drafters, **on_demand},
        plans={**plans, **_on_demand_plans(config, on_demand)},
        rule=RULES[speculation.rule].verify,
        draft_forced=speculation.forced,
        clock=clock,
    )
    return Loaded(engine, tokenizer, model.config, drafters, model.fingerprint, target, speculation)


def _speculation(config: EngineConfig, model: LoadedModel) -> Speculation:
    """The configured drafters. "auto" without a list means suffix decoding and the model's shipped head.

    If the head drafts on the device, prompt lookup takes the place of suffix decoding: the device does it
    itself, and suffix decoding on the host would delay every pass.
    """
    requested = config.speculative.speculation()
    if requested.auto and not requested.drafters:
        head = default_method(model.fingerprint) if model.backend.supports_features else None
        by_device = head is not None and model.backend.drafts_on_device
        lookup: Any = CONFIG.device_planner.lookup if by_device else "suffix"
        share = config.speculative.share_suffix_cache
        methods = [lookup] if head is None else [lookup, head]
        chosen = SpeculativeOptions(methods, share_suffix_cache=share).speculation()
        return replace(requested, drafters=chosen.drafters)
    return requested


def _cache_size(
    config: EngineConfig,
    model: LoadedModel,
    speculation: Speculation,
    drafters: Mapping[str, UnboundDrafter],
) -> CacheSize:
    """The size of the KV cache, in which drafters may have keys and values of their own."""
    backend, max_num_seqs = model.backend, config.scheduler.max_num_seqs
    levels = {name: configured.plan.levels for name, configured in speculation.drafters.items()}
    bytes_of_drafters = {name: drafter.bytes_per_page for name, drafter in drafters.items()}
    heads = [levels[name] for name, own_bytes in bytes_of_drafters.items() if own_bytes]
    deepest = max(heads or levels.values(), default=0)  # beside a head, longer lookups are for few requests
    rows = max_num_seqs * (2 + deepest)  # of a pass with the deepest drafts
    return size_cache(
        page_size=backend.page_size,
        page_bytes=PageBytes.of(
            backend.bytes_per_page() + sum(bytes_of_drafters.values()),
            backend.bytes_per_window_page(),
            backend.window_group,
            backend.page_size,
            max_num_seqs,
            config.max_num_batched_tokens,
        ),
        model_context=model.config.max_position,
        max_model_len=config.model.max_model_len,
        memory_bytes=config.cache.kv_cache_memory_bytes,
        available_bytes=max(0, available_memory() - backend.buffer_bytes),
        device=backend.device_memory(rows, config.model.max_model_len or model.config.max_position),
        utilization=config.cache.gpu_memory_utilization,
        states_bytes=states_memory(backend.bytes_per_state, max_num_seqs, backend.spare_states),
    )


def _on_demand(
    config: EngineConfig, speculation: Speculation, target: Target, kv: KVCache
) -> dict[str, OnDemandDrafter]:
    """The methods that requests may name although they are not configured."""
    share = config.speculative.share_suffix_cache

    def load(name: str) -> Drafter:
        options = SpeculativeOptions(name, share_suffix_cache=share)
        return load_drafter(name, options.speculation().drafters[name], target).bind(kv)

    return {
        name: OnDemandDrafter(name, partial(load, name))
        for name, method in METHODS.items()
        if method.on_demand and name not in speculation.drafters
    }


def _on_demand_plans(config: EngineConfig, names: Iterable[str]) -> dict[str, DraftPlan]:
    """The plans of requests that name such a method and nothing else; they fit into a pass."""
    room = config.max_num_batched_tokens - 1
    return {name: parse_plan(ConfigError, {}, None, name, trees=False).shrunk(room) for name in names}


def _controller(
    config: EngineConfig, model: LoadedModel, speculation: Speculation, drafters: Mapping[str, Drafter]
) -> Controller:
    """The controller: adaptive for "auto", otherwise the configured plan."""
    plans = {
        name: configured.plan for name, configured in speculation.drafters.items() if configured.plan.budget
    }
    if not (speculation.auto and plans):
        return FixedController(speculation.default_plan)
    log, requested = config.speculative.log_decisions, config.speculative.speculation()
    decisions = None if log is None else DecisionLog(Path(log))

    def floor(name: str) -> float:
        """The lowest chance that the user wants drafted. A head's own value is for fixed plans: it was tuned
        on one machine, and the controller knows what rows and passes of a head cost on this one."""
        min_prob: float | None = getattr(speculation.drafters[name].options, "min_prob", None)
        return min_prob or 0.0

    beginning = {} if requested.drafters else known_drafts(model.fingerprint)
    memory = Memory.of(f"{model.fingerprint} {config.backend} {model.backend.name}")
    return AutoController(
        {name: replace(plan, least_chance=floor(name)) for name, plan in plans.items()},
        step_costs(model.backend, model.config.max_position, memory),
        log=decisions,
        backlogs={name: kv.backlog for name in plans if (kv := drafters[name].kv) is not None},
        memory=memory,
        beginning=beginning,
        device=_device_planner(plans, drafters, beginning) if model.backend.drafts_on_device else None,
    )


def _device_planner(
    plans: Mapping[str, DraftPlan], drafters: Mapping[str, Drafter], beginning: Mapping[str, Any]
) -> DevicePlanner | None:
    """The planner for device passes, of the first head that drafts there and the first drafter that looks up
    there; without a head, of all that draft from texts."""
    on_device = {name: device for name, device in drafts_on_device(drafters).items() if name in plans}
    head = next((name for name, device in on_device.items() if device.attaches), None)
    by_texts = [name for name, device in on_device.items() if not device.attaches]
    lookup = next((name for name in by_texts if not on_device[name].drafts_on_host), None)
    chosen = by_texts if head is None else [name for name in (lookup, head) if name is not None]
    longest = {name: plans[name].levels for name in chosen}
    arms = device_arms(head, lookup, longest, trees=head is not None and on_device[head].drafts_trees)
    heads = () if head is None else (head,)
    return DevicePlanner(arms, prior_acceptance(longest, heads, beginning)) if arms else None
