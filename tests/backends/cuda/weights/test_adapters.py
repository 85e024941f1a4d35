"""LoRA adapters on the cuda backend: the logits of merged weights, the same bits beside any other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from paceline.backends.torch.backend import TorchBackend
from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import Drafter
from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint
from paceline.models.files.layout import expected_tensors
from paceline.models.lora import Adapter, LoraMatrix
from paceline.models.registry import load_checkpoint
from tests.backends.adapters import drive_with, extend_all, random_adapters
from tests.backends.cuda.decode.test_decode_loop import CONFIG, PAGE_SIZE, Case
from tests.backends.cuda.test_backend import PROMPT, TREE_PARENTS, TREE_TOKENS, needs_gpu
from tests.backends.cuda.test_overlapped_engine import Copies, random_head
from tests.backends.driver import run
from tests.engines import new_engine
from tests.tiny import save_checkpoint
from tests.tiny_families import VOCAB_SIZE
from tests.toy import ToyTokenizer, drain

NAMES = ("b", "", "a")
FAMILIES = ("llama", "qwen2", "qwen3", "granite", "gemma3", "olmo2", "phi3-partial-rope")
MIXTURES = ("qwen3-moe", "mixtral", "glm4-moe", "gpt-oss")  # of which the attention is changed


def make(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quantization: str = "none") -> Any:
    from paceline.backends.cuda.backend import CudaBackend

    if quantization != "none":
        adapters = random_adapters(checkpoint.config)
        return CudaBackend.load(checkpoint, quantization=quantization, max_rows=64, adapters=adapters)
    from paceline.backends.cuda.weights.adapters import with_adapters
    from tests.backends.cuda.test_backend import make as make_plain

    weights = make_plain(checkpoint, device, dtype).weights
    return CudaBackend(with_adapters(weights, random_adapters(checkpoint.config)), max_rows=64)


def test_a_step_has_the_logits_of_merged_weights_and_the_bits_of_a_step_without_adapters(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Of the request with the adapter, and of the one beside it; all projections of the layer are changed."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.weights.adapters import with_adapters
    from paceline.backends.cuda.weights.model_weights import load_weights

    shapes = dict(expected_tensors(CONFIG))

    def random(*key: str, size: tuple[int, ...], scale: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(crc32(" ".join(key).encode()))
        return scale * torch.randn(size, generator=generator)

    def change(name: str) -> LoraMatrix:
        (outputs, inputs), rank = shapes[name], 5
        down = random(name, "A", size=(rank, inputs), scale=0.2)
        return LoraMatrix(down.numpy(), random(name, "B", size=(outputs, rank), scale=0.2).numpy())

    def take(name: str) -> torch.Tensor:
        return (("norm" in name) + random(name, size=shapes[name], scale=0.25)).to(device, dtype)

    matrices = {name.removesuffix(".weight"): change(name) for name in shapes if "_proj" in name}

    def merged(name: str) -> torch.Tensor:
        own, weight = matrices.get(name.removesuffix(".weight")), take(name)
        return weight if own is None else (weight.cpu() + torch.from_numpy(own.up @ own.down)).to(weight)

    def logits(weights: Any, numbers: Sequence[int]) -> torch.Tensor:
        """Of two requests that are the same but for their adapters."""
        case = Case(0.0, device, dtype)
        state, pool = case.state, case.pool()
        for own in (state.pages, state.tokens, state.lengths):
            own[0] = own[1]
        state.pages[0, 0] = 0
        for stored in (pool.keys, pool.values):
            stored[:, :PAGE_SIZE] = stored[:, 2 * PAGE_SIZE :]
        state.adapters[:] = torch.tensor(numbers, device=device)
        loop = DecodeLoop(weights, pool, state, 2, PAGE_SIZE)
        loop.begin([0, 1], 2)
        loop.step(2, has_adapters=max(numbers) >= 0)
        return loop._workspace.logits[:2, :60].float().cpu()

    base = load_weights(CONFIG, take)
    adapted = with_adapters(base, [Adapter("x", {}), Adapter("y", matrices)])
    plain, mixed = logits(base, [-1, -1]), logits(adapted, [-1, 1])
    assert torch.equal(mixed[0], plain[0])
    assert torch.equal(logits(adapted, [1, -1])[0], mixed[1])
    expected = logits(load_weights(CONFIG, merged), [-1, -1])[1]
    assert float((expected - plain[1]).abs().max()) > 0.5
    np.testing.assert_allclose(mixed[1], expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("family", ["deepseek-v2", "qwen3-moe"])
def test_adapters_of_latents_and_of_experts_are_refused_before_loading(family: str, tmp_path: Path) -> None:
    from paceline.backends.cuda.backend import CudaBackend

    checkpoint = load_checkpoint(save_checkpoint(family, tmp_path / family))
    adapters = random_adapters(checkpoint.config, everywhere=True)
    if family == "qwen3-moe":
        adapters = [
            replace(own, matrices={n: m for n, m in own.matrices.items() if "mlp" in n}) for own in adapters
        ]
    unread = replace(checkpoint, tensors={})
    with pytest.raises(
        BackendError,
        match=r"cannot run adapter a, which changes model\.layers\.0\.(self_"
        r"attn\.q_proj|mlp\.experts\.0\.gate_proj): .* merge the adapter",
    ):
        CudaBackend.load(unread, max_rows=64, adapters=adapters)


def test_adapters_of_models_with_recurrent_layers_are_refused_before_loading(tmp_path: Path) -> None:
    """Whatever they change: their attention was never tried with adapters either."""
    from paceline.backends.cuda.backend import CudaBackend

    checkpoint = load_checkpoint(save_checkpoint("qwen3-5", tmp_path / "model"))
    unread, adapters = replace(checkpoint, tensors={}), random_adapters(checkpoint.config)
    refused = r"cannot run adapter a: .* recurrent layers \(qwen3_5_text\) .* torch or cpu, or merge"
    with pytest.raises(BackendError, match=refused):
        CudaBackend.load(unread, max_rows=64, adapters=adapters)


@needs_gpu
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_logits_are_those_of_torch(
    family: str, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    checkpoint = load_checkpoint(save_checkpoint(family, tmp_path / family))
    adapters, found = random_adapters(checkpoint.config), []
    for backend in (make(checkpoint, device, dtype), TorchBackend.load(checkpoint, adapters=adapters)):
        requests = drive_with(backend, 3, NAMES)
        prefill = extend_all(requests, PROMPT)
        tree = run([request.ask(TREE_TOKENS, TREE_PARENTS) for request in requests]).logits
        found.append(np.concatenate((prefill, tree.reshape(len(NAMES), len(TREE_TOKENS), -1)), axis=1))
    difference = np.abs(found[0] - found[1])
    assert np.isfinite(difference).all()
    assert np.median(difference) < 0.08
    far = difference.max(axis=2) > 2.0  # of rows: where scores are close, rounding chooses other experts
    assert far.mean() <= (0.1 if family in MIXTURES else 0)


@needs_gpu
@pytest.mark.parametrize("quantization", ["none", "int4", "int8", "fp8"])
def test_a_row_has_the_same_bits_beside_any_others(
    quantization: str, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Alone, in pieces, beside other adapters; and without one, those of a pass that has none."""
    checkpoint = load_checkpoint(save_checkpoint("llama", tmp_path / "llama"))
    backend = make(checkpoint, device, dtype, quantization)
    alone = np.concatenate([extend_all(drive_with(backend, 3, [name]), PROMPT) for name in NAMES])
    assert all(np.abs(alone[number] - alone[1]).max() > 0.5 for number in (0, 2))
    together = drive_with(backend, 3, NAMES)
    pieces = [extend_all(together, PROMPT[begin:end]) for begin, end in ((0, 7), (7, 8), (8, 17))]
    assert np.array_equal(np.concatenate(pieces, axis=1), alone[:, :17])


def engine_outputs(
    backend: Any, temperature: float, together: bool, on_device: bool, drafter: Drafter | None = None
) -> list[list[int]]:
    """The tokens of more requests than there are slots, with each adapter and none."""
    from paceline.engine.admission import Limits

    if not on_device:
        backend.make_async_decoder = lambda *rest: None
    drafters = {"drafter": drafter} if drafter else {}
    controller = FixedController(DraftPlan("drafter", 3) if drafter else PLAIN)
    limits = Limits(VOCAB_SIZE, 96, 4, 32)
    engine = new_engine(
        backend, ToyTokenizer(), limits, num_pages=60, drafters=drafters, controller=controller
    )
    requests = []
    for number in range(7):
        prompt = np.random.default_rng(number // 3).integers(2, VOCAB_SIZE, 20).tolist()
        params = SamplingParams(temperature=temperature, seed=number // 3, max_tokens=20, ignore_eos=True)
        requests += engine.add_request(prompt, params, adapter=("", "a", "b")[number % 3])
        if not together:
            drain(engine, scribble=False)
    drain(engine, scribble=False)
    assert not any(request.error or request.failed_drafters for request in requests)
    return [request.output_token_ids for request in requests]


@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_with_adapters_are_decoded_on_the_device(
    temperature: float, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Plain and drafted, they give the tokens of each alone in host passes."""
    checkpoint = load_checkpoint(save_checkpoint("llama", tmp_path / "llama"))
    expected = engine_outputs(make(checkpoint, device, dtype), temperature, False, False)
    assert len({tuple(ids) for ids in expected}) == len(expected)
    for make_drafter in (lambda backend: None, random_head, lambda backend: Copies()):
        backend = make(checkpoint, device, dtype)
        assert engine_outputs(backend, temperature, True, True, make_drafter(backend)) == expected
