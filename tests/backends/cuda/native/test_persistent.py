"""One kernel for all layers of few rows has the bits of the kernels that run one after the other.

It is not Triton, so there is no interpreter for it: without a Hopper only the way around it is tested.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.models.config import ModelConfig, MoeConfig, RopeConfig
from paceline.models.files.layout import expected_tensors

LONGEST, PAGE_SIZE, STEPS = 1024, 16, 3
CONFIG = ModelConfig("qwen2", 320, 256, 2, 4, 2, 64, 640, 1e-6, RopeConfig(1e4), LONGEST, True, qkv_bias=True)
# eight heads share keys, so a tile of attention has two rows, and a longer chain has several tiles; and
# matrices are large enough that their depth is split
WIDE = ModelConfig("llama", 320, 1024, 2, 16, 2, 64, 2304, 1e-6, RopeConfig(1e4), LONGEST, True)
NORMED = replace(WIDE, qk_norm=True)
EXPERTS = MoeConfig(40, 4, 256, True, frozenset({0, 1}))
MIXTURE = replace(NORMED, family="qwen3_moe", moe=EXPERTS)
LARGE_EXPERTS = replace(EXPERTS, num_experts=128, experts_per_token=8, intermediate_size=768)
QWEN3_30B_A3B = replace(
    MIXTURE, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, moe=LARGE_EXPERTS
)
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")


def random_weights(config: ModelConfig) -> Any:
    from paceline.backends.cuda.weights.model_weights import load_weights

    shapes, generator = dict(expected_tensors(config)), torch.Generator(device="cuda").manual_seed(5)

    def take(name: str) -> torch.Tensor:
        noise = torch.randn(shapes[name], generator=generator, device="cuda")
        return (1 + 0.2 * noise if "norm" in name else 0.1 * noise).to(torch.bfloat16)

    return load_weights(config, take)


def random_state(lengths: list[int]) -> Any:
    from paceline.backends.cuda.decode.decode_loop import make_requests

    requests, pages, generator = len(lengths), LONGEST // PAGE_SIZE, torch.Generator().manual_seed(9)
    state = make_requests(requests, LONGEST, PAGE_SIZE, torch.device("cuda"))
    state.pages.copy_(torch.randperm(requests * pages, generator=generator).view(requests, pages))
    state.lengths.copy_(torch.tensor(lengths))
    return state


def random_pool(config: ModelConfig, requests: int) -> Any:
    from paceline.backends.cuda.passes.kv_pool import Pool

    generator = torch.Generator().manual_seed(11)
    shape = (config.num_layers, requests * LONGEST, config.num_kv_heads, config.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for _ in range(2))
    return Pool(requests * LONGEST // PAGE_SIZE, 0, keys, values)


def decode(
    config: ModelConfig, lengths: list[int], drafted: int, feature_layers: tuple[int, ...], branching: int = 1
) -> tuple[list[torch.Tensor], bool]:
    """Logits and features of all steps, keys and values that they leave, and whether it was one kernel."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.decode.draft_shape import chain_shape, tree_shape

    requests = len(lengths)
    state, pool = random_state(lengths), random_pool(config, requests)
    shape = chain_shape(drafted) if branching == 1 else tree_shape(1 + drafted, branching, 3)
    loop = DecodeLoop(random_weights(config), pool, state, requests, PAGE_SIZE, None, shape, feature_layers)
    loop.begin(list(range(requests)), requests)
    left = []
    for _ in range(STEPS):
        loop.drafted(requests)[:, 1:] = torch.arange(drafted)
        loop.step(requests)
        left.append(loop._workspace.logits[: requests * (drafted + 1)].clone())
        left += [] if loop.features is None else [loop.features.clone()]
    return [*left, pool.keys, pool.values], any(loop._megakernel._passes.values())


@needs_hopper
@pytest.mark.parametrize(
    ("config", "lengths", "drafted", "feature_layers"),
    [
        (CONFIG, [150], 0, ()),
        (CONFIG, [63, 700], 0, ()),  # a block ends; more parts than all programs merge
        (CONFIG, [2, 2], 0, ()),  # nothing but a first block
        (CONFIG, [126], 1, ()),  # the second row sees the key of the first, and then opens a block
        (CONFIG, [300], 0, (0, 1, 2)),  # features ahead of all layers and behind them
        (CONFIG, [190], 2, (1,)),
        (CONFIG, [447, 5], 3, (2,)),
        (CONFIG, [20, 250, 63, 900, 1, 130, 512, 64], 0, (1,)),
        (WIDE, [62], 3, (2, 0)),
        (WIDE, [124], 5, (1, 2)),  # the last rows open a block
        (WIDE, [60, 700], 2, ()),
        (WIDE, [20, 250, 63, 900], 0, (1,)),
        (NORMED, [62], 0, (2, 0)),  # a block ends, and one begins
        (NORMED, [124], 5, (1, 2)),
        (NORMED, [60, 700], 2, ()),
        (NORMED, [20, 250, 63, 900], 0, (1,)),
        (MIXTURE, [126], 0, (1, 2)),
        (MIXTURE, [2], 0, ()),
        (QWEN3_30B_A3B, [150], 0, (0, 1, 2)),
        (QWEN3_30B_A3B, [1000], 0, ()),
    ],
)
def test_all_layers_in_one_kernel_have_the_same_bits(
    config: ModelConfig,
    lengths: list[int],
    drafted: int,
    feature_layers: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.backends.cuda.native.persistent import PersistentLayers

    left, in_one = decode(config, lengths, drafted, feature_layers)
    assert in_one
    monkeypatch.setattr(PersistentLayers, "run", lambda self, *known: False)
    expected, in_one = decode(config, lengths, drafted, feature_layers)
    assert not in_one
    assert all(torch.isfinite(own).all() for own in expected)
    assert all(map(torch.equal, left, expected))


@needs_hopper
@pytest.mark.parametrize(
    ("config", "lengths", "drafted", "branching"),
    [
        (CONFIG, [150], 7, 3),
        (CONFIG, [2], 4, 2),  # nothing but a first block
        (WIDE, [62], 7, 3),  # positions and KV indices on both sides of a block's end
        (WIDE, [57], 7, 4),  # KV indices only
        (WIDE, [61, 700], 3, 2),
        (NORMED, [62], 7, 3),
        (NORMED, [124], 7, 2),
    ],
)
def test_trees_in_one_kernel_have_the_same_bits(
    config: ModelConfig, lengths: list[int], drafted: int, branching: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.native.persistent import PersistentLayers

    left, in_one = decode(config, lengths, drafted, (1,), branching)
    assert in_one
    monkeypatch.setattr(PersistentLayers, "run", lambda self, *known: False)
    expected, _ = decode(config, lengths, drafted, (1,), branching)
    assert all(torch.isfinite(own).all() for own in expected)
    assert all(map(torch.equal, left, expected))


def draft(lengths: list[int], drafted: int) -> tuple[list[torch.Tensor], int]:
    """What a draft model leaves beside a target, and how many of its passes were one kernel."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.decode.draft_networks import ModelNetwork
    from paceline.backends.cuda.decode.draft_shape import chain_shape

    requests, chain = len(lengths), chain_shape(drafted)
    pool, size = random_pool(CONFIG, requests), CONFIG.vocab_size
    network = ModelNetwork(random_weights(CONFIG), pool, chain, requests, LONGEST, PAGE_SIZE, size)
    target = random_weights(WIDE), random_pool(WIDE, requests), random_state(lengths)
    loop = DecodeLoop(*target, requests, PAGE_SIZE, network)
    loop.begin(list(range(requests)), requests)
    left = []
    for _ in range(STEPS):
        loop.step(requests)
        left += [network._workspace.logits[:requests].clone(), loop.output.clone()]
    return [*left, pool.keys, pool.values], sum(map(bool, network._megakernel._passes.values()))


@needs_hopper
@pytest.mark.parametrize("lengths", [[126], [20, 300, 63]])
def test_every_pass_of_a_draft_model_can_be_one_kernel(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.native.persistent import PersistentLayers

    left, in_one = draft(lengths, 3)
    assert in_one == 3, "one that catches up, and two that draft further"
    monkeypatch.setattr(PersistentLayers, "run", lambda self, *known: False)
    expected, in_one = draft(lengths, 3)
    assert in_one == 0
    assert all(map(torch.equal, left, expected))


def layers_of_a_suited_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As on a Hopper, up to where the kernel is compiled."""
    from paceline.backends.cuda.native import nvrtc as native
    from paceline.backends.cuda.native import persistent

    monkeypatch.setattr(persistent, "compiler", lru_cache(native.compiler.__wrapped__))
    monkeypatch.setattr(persistent, "_sizes", lambda *known: {"ROWS": 1})
    workspace: Any = SimpleNamespace(attention=SimpleNamespace(blocks=1))
    nothing: Any = None
    return persistent.PersistentLayers(nothing, workspace, nothing, PAGE_SIZE)


def rows_at(address: int) -> Any:
    """Tables of rows that lie at this address."""
    return SimpleNamespace(
        paths=None, shared_prefix=None, adapters=None, positions=SimpleNamespace(data_ptr=lambda: address)
    )


def test_a_torch_without_the_compiler_is_told_once_and_runs_separate_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch.cuda, "_compile_kernel")
    layers = layers_of_a_suited_model(monkeypatch)
    assert not any(layers.run(torch.zeros(rows), rows_at(0)) for rows in (1, 2, 1))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "_compile_kernel" in caplog.text


def test_a_kernel_that_does_not_compile_is_a_warning_and_runs_separate_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from paceline.backends.cuda.native import persistent

    def broken(*known: Any) -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.cuda, "_compile_kernel", broken)
    monkeypatch.setattr(persistent, "_Pass", lambda *known: persistent.compiler()())
    layers = layers_of_a_suited_model(monkeypatch)
    assert not layers.run(torch.zeros(1), rows_at(0))
    assert not layers.run(torch.zeros(1), rows_at(0))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the driver is too old" in caplog.text


def test_other_devices_have_no_such_kernel() -> None:
    from paceline.backends.cuda.native.persistent import _sizes

    weights: Any = SimpleNamespace(config=CONFIG, layers=[None], device=torch.device("cpu"))
    tables: Any = SimpleNamespace(positions=torch.zeros(1))
    assert _sizes(weights, tables, PAGE_SIZE, 1) is None


def test_the_source_comes_with_the_package() -> None:
    from paceline.backends.cuda.native import (
        decode_attention,
        many_rows,
        persistent,
        prefill_attention,
        weight_pipeline,
    )

    folder = resources.files("paceline.backends.cuda.native") / "source"
    streamed = (*weight_pipeline.SHARED_SOURCES, "fused_layer", "logits", *many_rows.SOURCES)
    attending = *decode_attention.SOURCES, *prefill_attention.SOURCES
    wanted = {f"{name}.cu" for name in (*persistent.SOURCES, *attending, *streamed)}
    assert {entry.name for entry in folder.iterdir()} == wanted
