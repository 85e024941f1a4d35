"""`paceline bench gpu`: plain decoding on a CUDA device, with random weights of well-known shapes.

Speed does not depend on what the weights are, so nothing needs to be fetched. Beside our backend runs the
same model in plain torch: library products, a static cache, the whole step captured as one graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.backends.base import ForwardBatch, chain_parents
from paceline.backends.cuda.backend import PAGE_SIZE, CudaBackend
from paceline.backends.cuda.decode_loop import DecodeLoop, make_requests
from paceline.backends.cuda.weights import Weights, load_weights
from paceline.bench.gpu_torch import PlainDecode
from paceline.errors import BackendError, ConfigError
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.layout import expected_tensors
from paceline.models.transformer import Transformer

SHAPES = {
    "llama-3.2-1b": ModelConfig(
        "llama", 128256, 2048, 16, 32, 8, 64, 8192, 1e-5, RopeConfig(500000.0), 8192, tie_embeddings=True
    ),
    "qwen2.5-1.5b": ModelConfig(
        "qwen2", 151936, 1536, 28, 12, 2, 128, 8960, 1e-6, RopeConfig(1e6), 8192, True, qkv_bias=True
    ),
    "llama-3.1-8b": ModelConfig(
        "llama", 128256, 4096, 32, 32, 8, 128, 14336, 1e-5, RopeConfig(500000.0), 8192, tie_embeddings=False
    ),
}


@dataclass(frozen=True)
class Measured:
    """One line of the table."""

    shape: str
    engine: str  # paceline or torch
    requests: int
    milliseconds: float  # per step, which is per token of each request; the median of blocks of steps
    tokens_per_second: float
    floor: float  # milliseconds to read the weights once at the bandwidth measured here


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a reduction of a large array reads here."""
    data = torch.ones(1 << 30, dtype=torch.int32, device=device)
    return data.nbytes / (1e-3 * min(_timed(lambda: data.max()) for _ in range(10)))


def random_weights(config: ModelConfig, device: torch.device) -> Callable[[str], torch.Tensor]:
    """Random bfloat16 tensors of the names and shapes that a model of this config has."""
    shapes = dict(expected_tensors(config))

    def take(name: str) -> torch.Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(shape[1] ** -0.5)

    return take


def measure_gpu(
    shapes: Sequence[str],
    requests: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    on_line: Callable[[Measured], None],
) -> list[Measured]:
    """Every shape at every number of requests, ours and plain torch in turns."""
    if not torch.cuda.is_available():
        raise BackendError("`paceline bench gpu` needs a CUDA device, and torch sees none.")
    for name in shapes:
        if name not in SHAPES:
            raise ConfigError(f"there is no shape {name!r}; choose from {', '.join(SHAPES)}.")
    device = torch.device("cuda")
    speed = bandwidth(device)
    lines = []
    for name in shapes:
        weights = load_weights(SHAPES[name], random_weights(SHAPES[name], device))
        model = Transformer(SHAPES[name], random_weights(SHAPES[name], device))
        floor = 1e3 * weight_bytes(weights) / speed
        for count in requests:
            for engine, step in (
                ("paceline", measure_ours(weights, count, prompt_tokens, output_tokens)),
                ("torch", measure_torch(model, count, prompt_tokens, output_tokens)),
            ):
                lines.append(Measured(name, engine, count, step, 1e3 * count / step, floor))
                on_line(lines[-1])
    return lines


def weight_bytes(weights: Weights) -> int:
    """Bytes of weights that a step reads."""
    layers = [
        matrix.weight.nbytes
        for layer in weights.layers
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    return sum(layers) + weights.head.weight.nbytes


@torch.inference_mode()
def measure_ours(weights: Weights, requests: int, prompt_tokens: int, output_tokens: int) -> float:
    """Milliseconds per step of the decode loop."""
    loop = prefilled_loop(weights, requests, prompt_tokens, prompt_tokens + output_tokens + 1)
    read = torch.zeros((requests, 1), dtype=torch.int32, pin_memory=True)

    def step() -> None:
        loop.step(requests)
        read.copy_(loop.output, non_blocking=True)

    step()
    return _steps(step, output_tokens - 1)


@torch.inference_mode()
def prefilled_loop(weights: Weights, requests: int, prompt_tokens: int, longest: int) -> DecodeLoop:
    """A decode loop over requests with random prompts, whose prompts are computed."""
    config, device = weights.config, weights.device
    backend = CudaBackend(weights, max_rows=512)
    pages_each = -(-longest // PAGE_SIZE)
    pool = backend.make_pool(requests * pages_each)
    state = make_requests(requests, longest, PAGE_SIZE, device)
    pages = np.random.default_rng(0).permutation(requests * pages_each).astype(np.int32)
    pages = pages.reshape(requests, pages_each)
    prompts = (
        np.random.default_rng(1).integers(0, config.vocab_size, (requests, prompt_tokens)).astype(np.int32)
    )
    state.pages.copy_(torch.from_numpy(pages))
    state.tokens[:, :prompt_tokens] = torch.from_numpy(prompts)
    state.lengths.fill_(prompt_tokens - 1)  # the last token of the prompt is the first that the loop computes
    at_once = max(1, backend.max_rows // (prompt_tokens - 1))
    for first in range(0, requests, at_once):
        some = slice(first, min(first + at_once, requests))
        backend.forward(_prompts(prompts[some, :-1], pages[some], pool))
    loop = DecodeLoop(weights, pool, state, requests, PAGE_SIZE)
    loop.begin(list(range(requests)), requests)
    return loop


def _prompts(tokens: np.ndarray, pages: np.ndarray, pool: object) -> ForwardBatch:
    """A pass over whole prompts [requests, tokens]."""
    count, length = tokens.shape
    return ForwardBatch(
        tokens=tokens.reshape(-1),
        positions=np.tile(np.arange(length, dtype=np.int32), count),
        parents=chain_parents([length] * count),
        row_offsets=np.arange(count + 1, dtype=np.int32) * length,
        context_lengths=np.zeros(count, dtype=np.int32),
        page_tables=pages,
        logit_rows=np.zeros(0, dtype=np.int32),
        pool=pool,  # type: ignore[arg-type]
    )


@torch.inference_mode()
def measure_torch(model: Transformer, requests: int, prompt_tokens: int, output_tokens: int) -> float:
    """Milliseconds per step of the same model in plain torch, as one graph."""
    plain = PlainDecode(model, requests, prompt_tokens, prompt_tokens + output_tokens + 1)
    return _steps(plain.step, output_tokens - 1)


def _steps(step: Callable[[], None], count: int, blocks: int = 5) -> float:
    """The median over blocks of steps, in milliseconds per step."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    each = max(1, (count - 3) // blocks)
    times = []
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(each):
            step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) / each)
    return float(np.median(times))


def _timed(work: Callable[[], object]) -> float:
    """Milliseconds of work on the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)
