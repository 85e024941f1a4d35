"""From a configuration to a running engine."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.backends.load import load_backend
from paceline.config import EngineConfig
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.kv.sizing import available_memory, size_cache
from paceline.models.config import ModelConfig
from paceline.models.registry import load_checkpoint, load_tokenizer, resolve
from paceline.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model ready to serve."""

    engine: Engine
    tokenizer: Tokenizer
    model_config: ModelConfig


def build_engine(config: EngineConfig) -> Loaded:
    """An engine with the model, tokenizer and backend that the configuration names."""
    path = resolve(config.model.model)
    tokenizer = load_tokenizer(resolve(config.model.tokenizer) if config.model.tokenizer else path)
    checkpoint = load_checkpoint(path)
    backend = load_backend(checkpoint, config.backend, config.scheduler.max_num_batched_tokens)
    size = size_cache(
        page_size=backend.page_size,
        bytes_per_page=backend.bytes_per_page(),
        model_context=checkpoint.config.max_position,
        max_model_len=config.model.max_model_len,
        memory_bytes=config.cache.kv_cache_memory_bytes,
        available_bytes=available_memory(),
    )
    limits = Limits(
        checkpoint.config.vocab_size,
        size.max_model_len,
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
    )
    engine = Engine(
        backend,
        tokenizer,
        limits,
        num_pages=size.num_pages,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        seed=config.seed,
    )
    return Loaded(engine, tokenizer, checkpoint.config)
