"""From a configuration to a running engine. The one table that names the backends is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.backends.base import Backend
from paceline.config import BackendOptions, EngineConfig
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.kv.sizing import available_memory, size_cache
from paceline.models.checkpoint import Checkpoint
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


def load_backend(checkpoint: Checkpoint, options: BackendOptions, max_rows: int) -> Backend:
    """The backend that the options name, with the checkpoint's weights."""
    return _LOADERS[options.name](checkpoint, options, max_rows)


def _load_cpu(checkpoint: Checkpoint, options: BackendOptions, max_rows: int) -> Backend:
    from paceline.backends.cpu import CpuBackend

    return CpuBackend.load(
        checkpoint, quantization=options.quantization, threads=options.threads, max_rows=max_rows
    )


def _load_torch(checkpoint: Checkpoint, options: BackendOptions, max_rows: int) -> Backend:
    import torch  # here, because it takes seconds and the cpu backend does not need it

    from paceline.backends.torch_backend import TorchBackend

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtype = "float32" if options.dtype == "auto" else options.dtype
    return TorchBackend.load(checkpoint, device=options.device, dtype=dtype, max_rows=max_rows)


_LOADERS: dict[str, Callable[[Checkpoint, BackendOptions, int], Backend]] = {
    "cpu": _load_cpu,
    "torch": _load_torch,
}
