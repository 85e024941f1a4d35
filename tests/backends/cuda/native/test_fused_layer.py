"""The kernels that stream weights, fused layer and LM head, have the bits of the kernels they replace.

They are not Triton, so there is no interpreter for them: test_fused_layer_emulated.py runs them on the host.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.files.layout import expected_tensors

LONGEST, PAGE_SIZE, STEPS = 256, 16, 3
MANY_STEPS = 40  # graphs one after the other, with no synchronization in between
# sizes that are cut as those of an 8B: heads, output and down in two splits (packed, four or eight of one
# depth), gate and up and the head in one
CONFIG = ModelConfig(
    "qwen2", 17150, 3072, 3, 24, 12, 128, 10240, 1e-6, RopeConfig(1e4), LONGEST, True, qkv_bias=True
)
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")


def random_weights(quantization: str = "none") -> Any:
    from paceline.backends.cuda.weights.model_weights import load_weights, packing_for

    shapes, generator = dict(expected_tensors(CONFIG)), torch.Generator().manual_seed(5)

    def take(name: str) -> torch.Tensor:
        noise = torch.randn(shapes[name], generator=generator)
        return (1 + 0.2 * noise if "norm" in name else 0.03 * noise).to("cuda", torch.bfloat16)

    return load_weights(CONFIG, take, packing_for(quantization, lambda name: ""))


def decode(weights: Any, requests: int, given: Any) -> list[torch.Tensor]:
    """The logits and features of all steps with drafts of this shape, and the keys and values they leave."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop, make_requests
    from paceline.backends.cuda.passes.kv_pool import Pool

    pages, generator = LONGEST // PAGE_SIZE, torch.Generator().manual_seed(9)
    state = make_requests(requests, LONGEST, PAGE_SIZE, torch.device("cuda"))
    state.pages.copy_(torch.randperm(requests * pages, generator=generator).view(requests, pages))
    state.lengths.copy_(torch.randint(2, 200, (requests,), generator=generator))
    shape = (CONFIG.num_layers, requests * LONGEST, CONFIG.num_kv_heads, CONFIG.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for _ in range(2))
    pool = Pool(requests * pages, 0, keys, values)
    loop = DecodeLoop(weights, pool, state, requests, PAGE_SIZE, given=given, feature_layers=(1, 3))
    loop.begin([], requests)
    for _ in range(MANY_STEPS):
        loop.step(requests)  # of nothing but padding, which must leave nothing behind
    loop.begin(list(range(requests)), requests)
    left, features = [], loop.features
    assert features is not None
    for _ in range(STEPS):
        loop.step(requests)
        left += [loop._workspace.logits[: requests * len(given)].clone(), features.clone()]
    for _ in range(MANY_STEPS):
        loop.step(requests)
    return [*left, pool.keys, pool.values]


@needs_hopper
@pytest.mark.parametrize(
    ("requests", "drafted", "quantization"),
    [
        (1, 0, "none"),
        (1, 5, "none"),
        (8, 0, "none"),
        (3, 5, "none"),
        (16, 5, "none"),
        (11, 5, "none"),  # 66 rows: the rest of 96 is padding
        (1, 0, "fp8"),
        (2, 5, "fp8"),
        (3, 5, "fp8"),
        (9, 5, "fp8"),
        (1, 0, "int4"),
        (2, 5, "int4"),
        (3, 5, "int4"),
        (9, 5, "int4"),
    ],
)
def test_the_fused_layer_kernel_has_the_same_bits(
    requests: int, drafted: int, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda import model
    from paceline.backends.cuda.decode.draft_shape import chain_shape
    from paceline.backends.cuda.weights import lm_head

    weights, rows, shape = random_weights(quantization), requests * (drafted + 1), chain_shape(drafted)
    callers = {"run_fused_layer": model, "run_logits": lm_head}
    ran: dict[str, list[bool]] = {name: [] for name in callers}

    def watched(name: str, run: Any, *arguments: Any) -> bool:
        ran[name].append(run(*arguments))
        return ran[name][-1]

    for name, module in callers.items():
        monkeypatch.setattr(module, name, partial(watched, name, getattr(module, name)))
    results = decode(weights, requests, shape)
    by_pass = torch.tensor(ran["run_fused_layer"]).view(-1, CONFIG.num_layers)
    assert by_pass[:, :-1].all()
    assert (by_pass[:, -1] == (rows > 16)).all()  # few rows: not behind the last layer
    assert set(ran["run_logits"]) == {rows > 64}
    for name, module in callers.items():
        monkeypatch.setattr(module, name, lambda *arguments: False)
    expected = decode(weights, requests, shape)
    assert all(torch.isfinite(own.float()).all() for own in expected)
    assert all(torch.equal(own, other) for own, other in zip(results, expected, strict=True))


@needs_hopper
def test_warps_that_fall_behind_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not multiply sleep until slots of rows were filled anew several times."""
    from paceline.backends.cuda import model
    from paceline.backends.cuda.decode.draft_shape import chain_shape
    from paceline.backends.cuda.native import fused_layer, weight_pipeline
    from paceline.backends.cuda.native import nvrtc as native
    from paceline.backends.cuda.passes.compiling import cached_kernel

    begin, asleep = (
        "void skip_rows(Shared& s, RingPosition& at, Part part) {\n",
        "if (threadIdx.x % 128 / 32)",
    )

    changed: list[int] = []  # how often in each kernel

    class Sleepy(native.NativeKernel):
        def __init__(self, source: str, *rest: Any) -> None:
            super().__init__(source.replace(begin, f"{begin}    {asleep} __nanosleep(100000);\n"), *rest)
            changed.append(source.count(begin))

    find_kernel: Any = weight_pipeline.pipeline_kernel
    with monkeypatch.context() as patch:
        patch.setattr(native, "NativeKernel", Sleepy)
        patch.setattr(fused_layer, "pipeline_kernel", cached_kernel(find_kernel.__wrapped__))
        weights = random_weights()
        results = decode(weights, 1, chain_shape(5))
    assert 1 in changed
    monkeypatch.setattr(model, "run_fused_layer", lambda *arguments: False)
    assert all(map(torch.equal, results, decode(weights, 1, chain_shape(5))))


def test_on_the_host_nothing_is_done() -> None:
    from paceline.backends.cuda.kernels.products.matrix import Normed, Tiling, scratch_for, tile_matrix
    from paceline.backends.cuda.native.fused_layer import LayerBuffers, run_fused_layer
    from paceline.backends.cuda.weights.model_weights import Layer

    zeros, tiling = torch.zeros(64, 64), Tiling(step=64)
    matrix, normed = tile_matrix(zeros, 64, tiling), Normed(zeros, zeros, 64, 1e-5)
    layer = Layer(zeros[0], matrix, None, matrix, zeros[0], matrix, matrix)
    buffers = LayerBuffers(zeros, zeros, normed, zeros, normed)
    assert not run_fused_layer(layer, buffers, zeros[0], 96, scratch_for([matrix], 16, zeros.device), None)


@pytest.mark.parametrize(("answer", "most"), [(0, 66), (0, 65), (1, 0)])
def test_programs_that_wait_for_each_other_must_all_be_resident(
    answer: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.native import fused_layer
    from paceline.backends.cuda.native import nvrtc as native

    def ask(count: Any, function: int, launch: Any) -> int:
        asked = launch._obj
        assert (list(asked.grid), list(asked.block), asked.shared) == ([132, 1, 1], [384, 1, 1], 1024)
        assert (function, asked.count, asked.attributes[0].kind) == (7, 1, native.CLUSTER)
        assert list(asked.attributes[0].value[:3]) == [2, 1, 1]
        count._obj.value = most
        return answer

    kernel = object.__new__(native.NativeKernel)
    kernel._kernel, kernel._shared = SimpleNamespace(func=7), 1024
    monkeypatch.setattr(native, "_driver", lambda: SimpleNamespace(cuOccupancyMaxActiveClusters=ask))
    assert fused_layer._all_fit_at_once(kernel, 132) == (most != 65)  # who cannot say does not forbid it
