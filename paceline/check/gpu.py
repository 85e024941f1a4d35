"""The cuda backend compared with the torch reference on a small random model, for `paceline check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.backends.base import Backend
from paceline.backends.fallbacks import fallbacks
from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.check.digest import CONFIG as DIGEST_CONFIG
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import chain_batch
from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.files.layout import expected_tensors
from paceline.models.files.safetensors_writer import encode

CONFIG = replace(DIGEST_CONFIG, max_position=256, tie_embeddings=True)
TOKENS = 40  # of the prompt
SPLIT = 13  # the second request gets its prompt in two chunks, the second beside another request
TOLERANCE = 0.05  # relative to the largest logit: bfloat16 has 8 bits, and two layers add up their rounding


def compare_gpu() -> str:
    """A summary if the kernels agree with torch; BackendError that names the difference otherwise."""
    checkpoint = Checkpoint(CONFIG, _random_tensors(np.random.default_rng(1)), Path("random"))
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, TOKENS).astype(np.int32)
    ours = load_backend(checkpoint, BackendOptions(backend="cuda"), TOKENS)
    reference = load_backend(checkpoint, BackendOptions(backend="torch", device="cuda"), TOKENS)
    alone, expected = _alone(ours, tokens), _alone(reference, tokens)
    error = float(np.abs(alone - expected).max() / np.abs(expected).max())
    if not error <= TOLERANCE:  # written so that NaN fails too
        raise BackendError(f"logits differ from torch by {error:.1e} of the largest")
    if not np.array_equal(_in_chunks(ours, tokens), alone):
        raise BackendError("a prompt in two chunks, beside another request, has other bits than alone")
    _compile_native_kernel()
    slower = "".join(f"; {by} instead of the kernel {name}" for name, by in fallbacks().items())
    same = "the same bits alone, in chunks and beside another request"
    return f"logits within {error:.0e} of torch; {same}{slower}"


def _compile_native_kernel() -> None:
    """Compile one kernel in CUDA C++, where the GPU has them: if it fails, it is among the fallbacks."""
    import torch

    if not torch.cuda.is_available():
        return
    from paceline.backends.cuda.native.prefill_attention import prefill_kernel
    from paceline.backends.cuda.native.weight_pipeline import supports_pipeline

    device = torch.device("cuda")
    if supports_pipeline(device):
        prefill_kernel(heads=8, kv_heads=2, page_size=16, scale=1.0, device=device)


def _random_tensors(random: np.random.Generator) -> dict[str, Tensor]:
    """Random matrices that keep the size of what they multiply, and norms of ones."""
    return {
        name: encode(
            random.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))
            if len(shape) == 2
            else np.ones(shape, dtype=np.float32)
        )
        for name, shape in expected_tensors(CONFIG)
    }


def _alone(backend: Backend, tokens: Int32Array) -> Float32Array:
    """The logits of a prompt in one pass."""
    pages = -(-len(tokens) // backend.page_size)
    batch = chain_batch(backend.make_pool(pages), [(tokens, 0, 0)], pages)
    return backend.forward(batch).logits.copy()


def _in_chunks(backend: Backend, tokens: Int32Array) -> Float32Array:
    """The same in two passes, the second of them beside another request."""
    pages = -(-len(tokens) // backend.page_size)
    pool = backend.make_pool(2 * pages)
    first = backend.forward(chain_batch(pool, [(tokens[:SPLIT], 0, 0)], pages)).logits.copy()
    other = tokens[::-1][:SPLIT].copy()
    both = chain_batch(pool, [(other, 0, 1), (tokens[SPLIT:], SPLIT, 0)], pages)
    return np.concatenate((first, backend.forward(both).logits[SPLIT:]))
