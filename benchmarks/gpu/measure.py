"""`python -m benchmarks gpu`: decoding on a CUDA device, plain and speculative, with random weights.

Speed does not depend on the values of weights, so nothing needs to be downloaded. Our plain decoding is
compared with the same model in plain torch: library products, a static cache, the whole step captured as
one CUDA graph. vLLM's figures on the same kind of GPU and the bar of each line are shown beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch

from benchmarks.gpu.drafts import (
    Drafting,
    draft_model,
    dspark,
    eagle3_chain,
    eagle3_tree,
    ngram,
    random_tensor,
)
from benchmarks.gpu.peers import peer_milliseconds
from benchmarks.gpu.plain_torch import PlainDecode
from benchmarks.gpu.plan import DRAFT_MODEL, SHAPES, Measured, Setting, bar_of
from benchmarks.gpu.power import Power, watched
from paceline.backends.cuda.backend import PAGE_SIZE, CudaBackend
from paceline.backends.cuda.decode.decode_loop import DecodeLoop, make_requests
from paceline.backends.cuda.decode.draft_shape import chain_shape
from paceline.backends.cuda.kernels.products.matrix import Matrix
from paceline.backends.cuda.native.nvrtc import leaving_out
from paceline.backends.cuda.passes.shared_prefix import find_shared_prefixes, uniform_rows
from paceline.backends.cuda.weights.model_weights import Weights, load_weights, packing_for
from paceline.core.forward import ForwardBatch, chain_parents
from paceline.errors import BackendError
from paceline.models.config import ModelConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.transformer.model import Transformer

WARM_UP = 4  # steps


def bandwidth(device: torch.device) -> float:
    """Bytes per second read by a reduction of a large array on this device."""
    data = torch.ones(1 << 30, dtype=torch.int32, device=device)
    return data.nbytes / (1e-3 * min(timed(lambda: data.max()) for _ in range(10)))


def random_weights(config: ModelConfig, device: torch.device) -> Callable[[str], torch.Tensor]:
    """Random bfloat16 tensors with the names and shapes of a model of this config."""
    shapes = dict(expected_tensors(config))
    return lambda name: random_tensor(shapes[name], device)


def measure_gpu(
    plan: Sequence[tuple[str, str, int]], setting: Setting, on_line: Callable[[Measured], None]
) -> list[Measured]:
    """The lines of a plan."""
    if not torch.cuda.is_available():
        raise BackendError(
            "`python -m benchmarks gpu` needs a CUDA device, and torch sees none: run it where there is one, "
            "with a torch build for CUDA."
        )
    device = torch.device("cuda")
    speed = bandwidth(device)
    lines: list[Measured] = []
    for shape, of_shape in groupby(plan, key=lambda line: line[0]):
        packing = packing_for(setting.quantization, lambda name: "random")
        weights = load_weights(SHAPES[shape], random_weights(SHAPES[shape], device), packing)
        as_trained = setting.quantization == "none"
        in_torch, is_usual = as_trained and _is_llama(SHAPES[shape]), setting.is_usual
        for method, of_method in groupby(of_shape, key=lambda line: line[1]):
            drafting = _DRAFTS[method](weights)
            for _, _, count in of_method:
                target_bytes = weight_bytes(weights, count * len(drafting.shape))
                floor = 1e3 * (target_bytes + drafting.bytes_read) / speed
                step, power, without = measure_both(weights, count, setting, drafting)
                plain = measure_torch(shape, count, setting) if method == "plain" and in_torch else None
                case = (shape, method, setting.quantization, count)
                vllm = peer_milliseconds(*case) if setting.is_peers else None
                bar = bar_of(shape, method, count, lines) if is_usual else None
                lines.append(Measured(shape, method, count, step, floor, plain, vllm, bar, without, power))
                on_line(lines[-1])
    return lines


def _is_llama(config: ModelConfig) -> bool:
    """Whether plain_torch.py has all blocks of the model."""
    return config.moe is None and not config.beyond_llama()


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
    "dspark": dspark,
    "model": _with_model,
    "ngram": ngram,
}


def weight_bytes(weights: Weights, rows: int = 1) -> int:
    """Bytes of weights that a step of `rows` rows reads; experts are assumed to be chosen evenly."""
    total = float(_bytes_of(*weights.matrices))
    latents = [own for layer in weights.layers if (own := layer.latent) is not None]
    total += sum(own.to_latents.weight.nbytes + own.to_values.weight.nbytes for own in latents)
    for mixture in (layer.mixture for layer in weights.layers if layer.mixture is not None):
        experts = mixture.moe.num_experts
        unused = (1 - mixture.moe.experts_per_token / experts) ** rows
        total -= unused * _bytes_of(mixture.gate_up, mixture.down) * experts / mixture.experts
    return round(total)


def _bytes_of(*matrices: Matrix) -> int:
    read = [tensor for matrix in matrices for tensor in (matrix.weight, matrix.scales)]
    return sum(tensor.nbytes for tensor in read if tensor is not None)


Step = tuple[float, Power | None]  # milliseconds, and the GPU's power


def measure_both(
    weights: Weights, requests: int, setting: Setting, drafting: Drafting
) -> tuple[float, Power | None, float | None]:
    """A step, and its milliseconds without some kernels if requested: then twice each, alternately."""
    if not setting.without:
        return *measure_ours(weights, requests, setting, drafting), None
    steps: dict[tuple[str, ...], list[Step]] = {(): [], setting.without: []}
    for names in list(steps) * 2:
        with leaving_out(names):
            steps[names].append(measure_ours(weights, requests, setting, drafting))
    best, without = (min(runs, key=lambda step: step[0]) for runs in steps.values())
    return *best, without[0]


@torch.inference_mode()
def measure_ours(weights: Weights, requests: int, setting: Setting, drafting: Drafting) -> Step:
    """A step of the decode loop, whose tokens are copied to the host."""
    loop = prefilled_loop(weights, requests, setting, drafting)
    results = torch.zeros(loop.results.shape, dtype=torch.int32, pin_memory=True)

    def step() -> None:
        loop.step(requests)
        results.copy_(loop.results, non_blocking=True)  # like the engine

    warm_up(step)
    return watched(weights.device, lambda: time_steps(step, setting.output_tokens))


@torch.inference_mode()
def prefilled_loop(weights: Weights, requests: int, setting: Setting, drafting: Drafting) -> DecodeLoop:
    """A decode loop over requests with random, already prefilled prompts."""
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
    state.lengths.fill_(prompt_tokens - 1)  # the loop first computes the last token of the prompt
    _prefill(backend, prompts[:1, :-1], pages[:1], pool, 0)
    _prefill(backend, prompts[1:, :-1], pages[1:], pool, common * PAGE_SIZE)
    draft = None if drafting.make is None else drafting.make(requests, requests * pages_each, longest)
    known = weights, pool, state, requests, PAGE_SIZE, draft, drafting.shape
    states = backend.make_states(requests).tensors if config.recurrent else None  # which stay empty
    loop = DecodeLoop(*known, look_up=drafting.look_up, states=states)
    loop.begin(list(range(requests)), requests)
    begins = np.arange(requests, dtype=np.int32) * pages_each
    computed = np.full(requests, prompt_tokens - 1, dtype=np.int32)
    rows = uniform_rows(pages, begins, computed, loop.nodes)
    loop.use_shared_prefix(find_shared_prefixes(rows, PAGE_SIZE, *weights.head_groups))
    return loop


def _prefill(backend: CudaBackend, tokens: np.ndarray, pages: np.ndarray, pool: object, start: int) -> None:
    """Compute prompts [requests, tokens] from token `start` on, in passes of as many rows as fit."""
    count, length = tokens.shape
    for begin in range(start, length, backend.max_rows):
        chunk = tokens[:, begin : begin + backend.max_rows]
        at_once = max(1, backend.max_rows // chunk.shape[1])
        for first in range(0, count, at_once):
            some = slice(first, min(first + at_once, count))
            backend.forward(_chunks(chunk[some], pages[some], pool, begin))


def _chunks(tokens: np.ndarray, pages: np.ndarray, pool: object, context: int) -> ForwardBatch:
    """A pass over parts of prompts [requests, tokens] after `context` computed tokens of each."""
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
    """Milliseconds per step of the same model in plain torch, as one CUDA graph."""
    model = Transformer(SHAPES[shape], random_weights(SHAPES[shape], torch.device("cuda")))
    plain = PlainDecode(model, requests, setting.prompt_tokens, setting.longest)
    warm_up(plain.step)
    return time_steps(plain.step, setting.output_tokens)


def warm_up(step: Callable[[], None]) -> None:
    """Some untimed steps: the first compiles and captures kernels."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()


def time_steps(step: Callable[[], None], count: int, blocks: int = 5) -> float:
    """The median over blocks of steps, in milliseconds per step; `count` includes the steps of `warm_up`."""
    each = max(1, (count - WARM_UP) // blocks)
    times = []
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(each):
            step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) / each)
    return float(np.median(times))


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of work on the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)
