"""`paceline bench gpu`: decoding on a CUDA device, plain and speculative, with random weights.

Speed does not depend on what the weights are, so nothing needs to be fetched. Beside plain decoding of our
backend runs the same model in plain torch: library products, a static cache, the whole step captured as one
graph. What vLLM gave on the same kind of card is told beside it, and so is the bar of each line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from paceline.backends.cuda.backend import PAGE_SIZE, CudaBackend
from paceline.backends.cuda.decode_loop import DecodeLoop, make_requests
from paceline.backends.cuda.draft_shape import chain_shape
from paceline.backends.cuda.kernels.matrix import Matrix
from paceline.backends.cuda.native import ALIASES, KERNELS, leaving_out
from paceline.backends.cuda.shared_prefix import find_shared_prefixes, uniform_rows
from paceline.backends.cuda.weights import Weights, load_weights, packing_for
from paceline.bench.gpu_drafting import (
    Drafting,
    draft_model,
    eagle3_chain,
    eagle3_tree,
    ngram,
    random_tensor,
)
from paceline.bench.gpu_power import Power, watched
from paceline.bench.gpu_torch import PlainDecode
from paceline.core.forward import ForwardBatch, chain_parents
from paceline.errors import BackendError, ConfigError
from paceline.models.config import ModelConfig, MoeConfig, RopeConfig
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
    "qwen3-30b-a3b": ModelConfig(
        "qwen3_moe",
        151936,
        2048,
        48,
        32,
        4,
        128,
        6144,
        1e-6,
        RopeConfig(1e6),
        8192,
        tie_embeddings=False,
        qk_norm=True,
        moe=MoeConfig(128, 8, 768, True, frozenset(range(48))),
    ),
}


# milliseconds of a step by shape, method and requests: of vLLM 0.26 on an H200, and the bar of this project
VLLM = {
    ("llama-3.2-1b", "plain"): {1: 2.20, 16: 2.10, 64: 2.89},
    ("qwen2.5-1.5b", "plain"): {1: 2.15, 16: 2.21, 64: 2.83},
    ("llama-3.1-8b", "plain"): {1: 4.83, 16: 5.17, 64: 5.97},
    ("llama-3.1-8b", "eagle3"): {1: 6.48, 16: 6.88, 64: 13.5},
    ("llama-3.1-8b", "ngram"): {1: 7.15, 16: 9.11},
    ("llama-3.1-8b", "model"): {1: 21.5, 16: 26.2},
}
BARS = {
    ("llama-3.2-1b", "plain"): {1: 0.8},
    ("qwen2.5-1.5b", "plain"): {1: 1.0, 64: 2.83},  # 22,600 tokens a second
    ("llama-3.1-8b", "plain"): {1: 4.2, 64: 5.5},
    ("llama-3.1-8b", "eagle3"): {1: 5.2, 16: 5.8},
    ("llama-3.1-8b", "ngram"): {1: 4.5},
    ("llama-3.1-8b", "model"): {1: 9.0},
}
TREE_TO_CHAIN = 1.1  # the bar of a tree: so many times the chain of the same run
COUNTS = {  # requests at once, by shape and method
    ("qwen2.5-1.5b", "plain"): (1, 16, 64, 256),
    ("llama-3.1-8b", "tree"): (1,),
    ("llama-3.1-8b", "model"): (1, 16),
    ("llama-3.1-8b", "ngram"): (1, 16),
}
USUAL_COUNTS = (1, 16, 64)
METHODS = ("plain", "eagle3", "tree", "model", "ngram")
SPECULATIVE = "llama-3.1-8b"  # the shape that drafts are measured beside
DRAFT_MODEL = "llama-3.2-1b"
LEAST_STEPS = 16
WARM_UP = 4  # steps


@dataclass(frozen=True)
class Measured:
    """One line of the table: milliseconds per step, the median of blocks of steps."""

    shape: str
    method: str
    requests: int
    milliseconds: float
    floor: float  # to read the weights of a step once, at the bandwidth measured here
    torch: float | None = None  # the same model in plain torch
    vllm: float | None = None
    bar: float | None = None
    without: float | None = None  # the same with some kernels left out
    power: Power | None = None  # that the card drew meanwhile

    @property
    def verdict(self) -> str:
        """Whether the bar is met; nothing where there is none."""
        return "" if self.bar is None else "met" if self.milliseconds <= self.bar else "missed"


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a reduction of a large array reads here."""
    data = torch.ones(1 << 30, dtype=torch.int32, device=device)
    return data.nbytes / (1e-3 * min(_timed(lambda: data.max()) for _ in range(10)))


def random_weights(config: ModelConfig, device: torch.device) -> Callable[[str], torch.Tensor]:
    """Random bfloat16 tensors of the names and shapes that a model of this config has."""
    shapes = dict(expected_tensors(config))
    return lambda name: random_tensor(shapes[name], device)


def planned(
    shapes: Sequence[str], methods: Sequence[str], requests: Sequence[int] | None
) -> list[tuple[str, str, int]]:
    """Shape, method and requests of every line; without `requests`, those that have bars and some more."""
    for names, known, kind in ((shapes, SHAPES, "shape"), (methods, METHODS, "method")):
        for name in names:
            if name not in known:
                raise ConfigError(f"there is no {kind} {name!r}; choose from {', '.join(known)}.")
    return [
        (shape, method, count)
        for shape in shapes
        for method in methods
        if method == "plain" or shape == SPECULATIVE
        for count in requests or COUNTS.get((shape, method), USUAL_COUNTS)
    ]


def measure_gpu(
    plan: Sequence[tuple[str, str, int]], setting: Setting, on_line: Callable[[Measured], None]
) -> list[Measured]:
    """The lines of a plan."""
    if not torch.cuda.is_available():
        raise BackendError(
            "`paceline bench gpu` needs a CUDA device, and torch sees none: run it where there is one, "
            "with a torch build for CUDA."
        )
    device = torch.device("cuda")
    speed = bandwidth(device)
    lines: list[Measured] = []
    for shape, of_shape in groupby(plan, key=lambda line: line[0]):
        packing = packing_for(setting.quantization, lambda name: "random")
        weights = load_weights(SHAPES[shape], random_weights(SHAPES[shape], device), packing)
        as_trained = setting.quantization == "none"
        in_torch, is_usual = as_trained and SHAPES[shape].moe is None, setting.is_usual
        for method, of_method in groupby(of_shape, key=lambda line: line[1]):
            drafting = _DRAFTS[method](weights)
            for _, _, count in of_method:
                target_bytes = weight_bytes(weights, count * len(drafting.shape))
                floor = 1e3 * (target_bytes + drafting.bytes_read) / speed
                step, power, without = measure_both(weights, count, setting, drafting)
                plain = measure_torch(shape, count, setting) if method == "plain" and in_torch else None
                vllm = VLLM.get((shape, method), {}).get(count) if is_usual else None
                bar = bar_of(shape, method, count, lines) if is_usual else None
                lines.append(Measured(shape, method, count, step, floor, plain, vllm, bar, without, power))
                on_line(lines[-1])
    return lines


def bar_of(shape: str, method: str, requests: int, lines: Sequence[Measured]) -> float | None:
    """What a line is measured against; that of a tree is the chain beside it."""
    if method == "tree":
        chains = [
            line for line in lines if (line.shape, line.method, line.requests) == (shape, "eagle3", requests)
        ]
        return TREE_TO_CHAIN * chains[0].milliseconds if chains else None
    return BARS.get((shape, method), {}).get(requests)


def _plain(target: Weights) -> Drafting:
    return Drafting(chain_shape(0), None, 0)


def _with_model(target: Weights) -> Drafting:
    config = SHAPES[DRAFT_MODEL]
    draft = load_weights(config, random_weights(config, target.device))
    return draft_model(target, draft, weight_bytes(draft))


_DRAFTS: dict[str, Callable[[Weights], Drafting]] = {
    "plain": _plain,
    "eagle3": eagle3_chain,
    "tree": eagle3_tree,
    "model": _with_model,
    "ngram": ngram,
}


def weight_bytes(weights: Weights, rows: int = 1) -> int:
    """Bytes of weights that a step of so many rows reads; experts are taken to be chosen evenly."""
    total = float(_bytes_of(*weights.matrices))
    for mixture in (layer.mixture for layer in weights.layers if layer.mixture is not None):
        unused = (1 - mixture.chosen / mixture.experts) ** rows
        total -= unused * _bytes_of(mixture.gate_up, mixture.down)
    return round(total)


def _bytes_of(*matrices: Matrix) -> int:
    read = [tensor for matrix in matrices for tensor in (matrix.weight, matrix.scales)]
    return sum(tensor.nbytes for tensor in read if tensor is not None)


@dataclass(frozen=True)
class Setting:
    """How long requests are, and how weights are packed."""

    prompt_tokens: int = 128
    output_tokens: int = 256
    quantization: str = "none"  # or fp8, int8, int4
    without: tuple[str, ...] = ()  # kernels that are left out, for comparison
    common_tokens: int = 0  # with which all prompts begin; they are stored once

    def __post_init__(self) -> None:
        if not 0 <= self.common_tokens < self.prompt_tokens:
            raise ConfigError(
                f"--common-tokens are the first of --input-tokens {self.prompt_tokens}: give fewer, not "
                f"{self.common_tokens}."
            )
        for name in self.without:
            if name not in KERNELS and name not in ALIASES:
                raise ConfigError(f"--without knows no kernel {name!r}; choose from {', '.join(KERNELS)}.")

    @property
    def is_usual(self) -> bool:
        """Whether bars and the figures of vLLM are of this setting."""
        return (self.prompt_tokens, self.quantization, self.common_tokens) == (128, "none", 0)

    @property
    def longest(self) -> int:
        """Tokens that there is room for: even the shortest measurement takes some steps."""
        return self.prompt_tokens + max(self.output_tokens, LEAST_STEPS) + 1


Step = tuple[float, Power | None]  # milliseconds, and what the card drew


def measure_both(
    weights: Weights, requests: int, setting: Setting, drafting: Drafting
) -> tuple[float, Power | None, float | None]:
    """A step, and its milliseconds with kernels left out if some are to be: then twice each, by turns."""
    if not setting.without:
        return *measure_ours(weights, requests, setting, drafting), None
    steps: dict[tuple[str, ...], list[Step]] = {(): [], setting.without: []}
    for names in list(steps) * 2:
        with leaving_out(names):
            steps[names].append(measure_ours(weights, requests, setting, drafting))
    best, without = (min(own, key=lambda step: step[0]) for own in steps.values())
    return *best, without[0]


@torch.inference_mode()
def measure_ours(weights: Weights, requests: int, setting: Setting, drafting: Drafting) -> Step:
    """A step of the decode loop, whose tokens are copied to the host."""
    loop = prefilled_loop(weights, requests, setting, drafting)
    results = torch.zeros(loop.results.shape, dtype=torch.int32, pin_memory=True)

    def step() -> None:
        loop.step(requests)
        results.copy_(loop.results, non_blocking=True)  # as the engine does

    warm_up(step)
    return watched(weights.device, lambda: time_steps(step, setting.output_tokens))


@torch.inference_mode()
def prefilled_loop(weights: Weights, requests: int, setting: Setting, drafting: Drafting) -> DecodeLoop:
    """A decode loop over requests with random prompts, whose prompts the target has computed."""
    config, device = weights.config, weights.device
    backend = CudaBackend(weights, max_rows=512)
    prompt_tokens, longest = setting.prompt_tokens, setting.longest
    pages_each = -(-longest // PAGE_SIZE)
    pool = backend.make_pool(requests * pages_each)
    state = make_requests(requests, longest, PAGE_SIZE, device)
    pages = np.random.default_rng(0).permutation(requests * pages_each).astype(np.int32)
    pages = pages.reshape(requests, pages_each)
    common = setting.common_tokens // PAGE_SIZE
    pages[:, :common] = pages[0, :common]
    shape = (requests, prompt_tokens)
    prompts = np.random.default_rng(1).integers(0, config.vocab_size, shape).astype(np.int32)
    prompts[:, : setting.common_tokens] = prompts[0, : setting.common_tokens]
    state.pages.copy_(torch.from_numpy(pages))
    state.tokens[:, :prompt_tokens] = torch.from_numpy(prompts)
    state.lengths.fill_(prompt_tokens - 1)  # the last token of the prompt is the first that the loop computes
    _prefill(backend, prompts[:1, :-1], pages[:1], pool, 0)
    _prefill(backend, prompts[1:, :-1], pages[1:], pool, common * PAGE_SIZE)
    draft = None if drafting.make is None else drafting.make(requests, requests * pages_each, longest)
    look_up = drafting.look_up
    loop = DecodeLoop(weights, pool, state, requests, PAGE_SIZE, draft, drafting.shape, look_up=look_up)
    loop.begin(list(range(requests)), requests)
    begins = np.arange(requests, dtype=np.int32) * pages_each
    computed = np.full(requests, prompt_tokens - 1, dtype=np.int32)
    own = uniform_rows(pages, begins, computed, loop.nodes)
    loop.use_shared_prefix(find_shared_prefixes(own, PAGE_SIZE, config.num_heads, config.num_kv_heads))
    return loop


def _prefill(backend: CudaBackend, tokens: np.ndarray, pages: np.ndarray, pool: object, known: int) -> None:
    """Compute prompts [requests, tokens] from `known` on, as many rows at once as a pass takes."""
    count, length = tokens.shape
    for begin in range(known, length, backend.max_rows):
        chunk = tokens[:, begin : begin + backend.max_rows]
        at_once = max(1, backend.max_rows // chunk.shape[1])
        for first in range(0, count, at_once):
            some = slice(first, min(first + at_once, count))
            backend.forward(_chunks(chunk[some], pages[some], pool, begin))


def _chunks(tokens: np.ndarray, pages: np.ndarray, pool: object, context: int) -> ForwardBatch:
    """A pass over parts of prompts [requests, tokens] behind so many computed tokens of each."""
    count, length = tokens.shape
    return ForwardBatch(
        tokens=tokens.reshape(-1),
        positions=np.tile(np.arange(context, context + length, dtype=np.int32), count),
        parents=chain_parents([length] * count),
        row_offsets=np.arange(count + 1, dtype=np.int32) * length,
        context_lengths=np.full(count, context, dtype=np.int32),
        page_tables=pages,
        logit_rows=np.zeros(0, dtype=np.int32),
        pool=pool,  # type: ignore[arg-type]
    )


@torch.inference_mode()
def measure_torch(shape: str, requests: int, setting: Setting) -> float:
    """Milliseconds per step of the same model in plain torch, as one graph."""
    model = Transformer(SHAPES[shape], random_weights(SHAPES[shape], torch.device("cuda")))
    plain = PlainDecode(model, requests, setting.prompt_tokens, setting.longest)
    warm_up(plain.step)
    return time_steps(plain.step, setting.output_tokens)


def warm_up(step: Callable[[], None]) -> None:
    """Some steps ahead of those that count: the first compiles kernels, and captures them."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()


def time_steps(step: Callable[[], None], count: int, blocks: int = 5) -> float:
    """The median over blocks of steps, in milliseconds per step; `count` has those of `warm_up`, too."""
    each = max(1, (count - WARM_UP) // blocks)
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
