"""One kernel for all layers of few rows has the bits of the kernels that run one after the other.

It is not Triton, so there is no interpreter for it: without a Hopper only the way around it is tested.
"""

from __future__ import annotations

import logging
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.layout import expected_tensors

LONGEST, PAGE_SIZE, STEPS = 1024, 16, 3
CONFIG = ModelConfig("qwen2", 320, 256, 2, 4, 2, 64, 640, 1e-6, RopeConfig(1e4), LONGEST, True, qkv_bias=True)
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")


def random_weights() -> Any:
    from paceline.backends.cuda.weights import load_weights

    shapes, generator = dict(expected_tensors(CONFIG)), torch.Generator().manual_seed(5)

    def take(name: str) -> torch.Tensor:
        noise = torch.randn(shapes[name], generator=generator)
        return (1 + 0.2 * noise if "norm" in name else 0.1 * noise).to("cuda", torch.bfloat16)

    return load_weights(CONFIG, take)


def decode(lengths: list[int], drafted: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The logits of all steps, the keys that they leave, and whether one kernel ran the layers."""
    from paceline.backends.cuda.decode_loop import DecodeLoop, make_requests
    from paceline.backends.cuda.draft_shape import chain_shape
    from paceline.backends.cuda.model import Pool

    requests, pages = len(lengths), LONGEST // PAGE_SIZE
    generator = torch.Generator().manual_seed(9)
    state = make_requests(requests, LONGEST, PAGE_SIZE, torch.device("cuda"))
    state.pages.copy_(torch.randperm(requests * pages, generator=generator).view(requests, pages))
    state.lengths.copy_(torch.tensor(lengths))
    shape = (CONFIG.num_layers, requests * LONGEST, CONFIG.num_kv_heads, CONFIG.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for _ in range(2))
    pool = Pool(requests * pages, 0, keys, values)
    loop = DecodeLoop(random_weights(), pool, state, requests, PAGE_SIZE, given=chain_shape(drafted))
    loop.begin(list(range(requests)), requests)
    rows, logits = requests * (drafted + 1), []
    for _ in range(STEPS):
        loop.step(requests)
        logits.append(loop._workspace.logits[:rows].clone())
    return torch.stack(logits), pool.keys, loop._few_rows._passes.get(rows) is not None


@needs_hopper
@pytest.mark.parametrize(
    ("lengths", "drafted"),
    [
        ([150], 0),
        ([63, 700], 0),  # a block ends; more parts than all programs merge
        ([2, 2], 0),  # nothing but a first block
        ([126], 1),  # two rows of one request: the second sees the key of the first, and then opens a block
    ],
)
def test_all_layers_in_one_kernel_have_the_same_bits(
    lengths: list[int], drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.persistent import PersistentLayers

    logits, keys, in_one = decode(lengths, drafted)
    assert in_one
    monkeypatch.setattr(PersistentLayers, "run", lambda self, tokens, tables: False)
    expected_logits, expected_keys, in_one = decode(lengths, drafted)
    assert not in_one
    assert torch.isfinite(expected_logits).all()
    assert torch.equal(logits, expected_logits)
    assert torch.equal(keys, expected_keys)


def layers_of_a_suited_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As on a Hopper, up to where the kernel is compiled."""
    from paceline.backends.cuda import persistent

    persistent._compiler.cache_clear()
    monkeypatch.setattr(persistent, "_sizes", lambda *known: {"ROWS": 1})
    workspace: Any = SimpleNamespace(attention=SimpleNamespace(blocks=1))
    nothing: Any = None
    return persistent.PersistentLayers(nothing, workspace, nothing, PAGE_SIZE)


def test_a_torch_without_the_compiler_is_told_once_and_runs_separate_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.delattr(torch.cuda, "_compile_kernel")
    layers = layers_of_a_suited_model(monkeypatch)
    tables: Any = None
    assert not any(layers.run(torch.zeros(rows), tables) for rows in (1, 2, 1))
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "_compile_kernel" in caplog.text


def test_a_kernel_that_does_not_compile_is_a_warning_and_runs_separate_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from paceline.backends.cuda import persistent

    def broken(*known: Any) -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.cuda, "_compile_kernel", broken)
    monkeypatch.setattr(persistent, "_Pass", lambda *known: persistent._compiler()())
    layers = layers_of_a_suited_model(monkeypatch)
    tables: Any = None
    assert not layers.run(torch.zeros(1), tables)
    assert not layers.run(torch.zeros(1), tables)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the driver is too old" in caplog.text


def test_other_devices_have_no_such_kernel() -> None:
    from paceline.backends.cuda.persistent import _sizes

    weights: Any = SimpleNamespace(config=CONFIG, layers=[None], device=torch.device("cpu"))
    tables: Any = SimpleNamespace(positions=torch.zeros(1))
    assert _sizes(weights, tables, PAGE_SIZE, 1) is None


def test_the_source_comes_with_the_package() -> None:
    from paceline.backends.cuda.persistent import SOURCES

    folder = resources.files("paceline.backends.cuda") / "source"
    assert {entry.name for entry in folder.iterdir()} == {f"{name}.cu" for name in SOURCES}
