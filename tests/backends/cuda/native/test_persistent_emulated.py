"""The megakernel in CUDA C++, compiled for the host: what it computes is the plain model. See emulated.h.

That it has the bits of the Triton kernels is tested on a GPU: see test_persistent.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from paceline.models.config import ModelConfig, MoeConfig, RopeConfig
from paceline.models.files.layout import expected_tensors
from tests.backends.cuda.emulating import HERE, Emulated, needs_compiler
from tests.large import REPEATS

PROGRAMS, SHARED, PAGE_SIZE, LONGEST = 8, 160 << 10, 16, 256
DENSE = ModelConfig("llama", 64, 256, 2, 4, 2, 64, 256, 1e-5, RopeConfig(1e4), LONGEST, True)
NORMED = replace(DENSE, qk_norm=True)
EXPERTS = MoeConfig(60, 2, 128, True, frozenset({0, 1}))
MIXTURE = replace(NORMED, moe=EXPERTS)
FOUR = replace(MIXTURE, num_layers=1, moe=replace(EXPERTS, experts_per_token=4, layers=frozenset({0})))
SHARED_KEYS = replace(DENSE, num_kv_heads=1)  # by four heads, so that a tile of attention has four rows
NORMED_KEYS = replace(SHARED_KEYS, qk_norm=True)
CHAIN, TREE = (-1, 0, 1), (-1, 0, 0, 1, 1, 2, 4)  # parents of rows


def weights_of(config: ModelConfig) -> tuple[dict[str, torch.Tensor], Any]:
    """Random tensors of bfloat16 numbers, by name, and as the backend has them."""
    from paceline.backends.cuda.weights.model_weights import load_weights

    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, shape in expected_tensors(config):
        noise = torch.randn(shape, generator=generator)
        tensors[name] = (1 + 0.2 * noise if "norm" in name else noise * shape[-1] ** -0.5).bfloat16()
    return {name: own.float() for name, own in tensors.items()}, load_weights(config, tensors.__getitem__)


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def normed(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight


def normed_rows(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rounded before the norm's factor, as products read them: close scores would choose other experts."""
    return rounded(hidden * weight) * torch.rsqrt(hidden.square().mean() + eps)


def rotated(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], position: int) -> torch.Tensor:
    cosine, sine = (own[position] for own in rotation)
    one, two = heads.chunk(2, -1)
    return torch.cat((one * cosine - two * sine, two * cosine + one * sine), -1)


class Reference:
    """One row after another through all layers; `keys` and `values` are [layers, position, KV heads, dim]."""

    def __init__(self, config: ModelConfig, tensors: dict[str, torch.Tensor], rotation: Any) -> None:
        self.config, self.tensors, self.rotation = config, tensors, rotation

    def run(
        self, hidden: torch.Tensor, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The residual stream [hidden] after the last layer."""
        for index in range(self.config.num_layers):
            hidden = hidden + self.attention(index, hidden, position, keys[index], values[index])
            hidden = hidden + self.feed_forward(index, hidden)
        return hidden

    def weight(self, index: int, name: str) -> torch.Tensor:
        return self.tensors[f"model.layers.{index}.{name}.weight"]

    def attention(
        self, index: int, hidden: torch.Tensor, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        rows = normed_rows(hidden, self.weight(index, "input_layernorm"), config.rms_norm_eps)
        query, key, value = (
            (self.weight(index, f"self_attn.{part}_proj") @ rows).view(-1, config.head_dim) for part in "qkv"
        )
        if config.qk_norm:
            query = normed(query, self.weight(index, "self_attn.q_norm"), config.rms_norm_eps)
            key = normed(key, self.weight(index, "self_attn.k_norm"), config.rms_norm_eps)
        query, key = (rotated(own, self.rotation, position) for own in (query, key))
        keys[position], values[position] = rounded(key), rounded(value)
        seen, group = slice(position + 1), config.num_heads // config.num_kv_heads
        scores = torch.einsum("hd,phd->hp", rounded(query), keys[seen].repeat_interleave(group, 1))
        chances = torch.softmax(scores * config.head_dim**-0.5, -1)
        mixed = torch.einsum("hp,phd->hd", chances, values[seen].repeat_interleave(group, 1))
        return self.weight(index, "self_attn.o_proj") @ rounded(mixed).flatten()

    def feed_forward(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        norm = self.weight(index, "post_attention_layernorm")
        rows = normed_rows(hidden, norm, self.config.rms_norm_eps)
        if self.config.moe is None:
            return self.mlp(index, "mlp", rows)
        scores = torch.softmax(self.weight(index, "mlp.gate") @ rows, -1)
        shares, chosen = torch.topk(scores, self.config.moe.experts_per_token)
        experts = [self.mlp(index, f"mlp.experts.{expert}", rows) for expert in chosen.tolist()]
        return (torch.stack(experts) * (shares / shares.sum())[:, None]).sum(0)

    def mlp(self, index: int, place: str, rows: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.weight(index, f"{place}.{part}_proj") for part in ("gate", "up", "down"))
        return down @ rounded(silu(gate @ rows) * (up @ rows))


def tables_of(root: int, shape: Any, pages: torch.Tensor, config: ModelConfig) -> Any:
    """The rows of one request's tree, whose root has this position."""
    from paceline.backends.cuda.decode.draft_shape import plan_step
    from paceline.backends.cuda.kernels.attention.paged_attention import MAX_PATH, tile_height
    from paceline.backends.cuda.kernels.attention.row_tables import RowTables, UniformRows

    height = tile_height(config.num_heads, config.num_kv_heads)
    plan = plan_step(shape, height, catch_up_rows=0, draft_height=1)
    _, _, _, node, depth, contiguous, *_ = torch.from_numpy(plan.rows)
    first = torch.from_numpy(plan.tiles)[3]
    paths = torch.zeros((len(shape), MAX_PATH), dtype=torch.int32)
    paths[:, : plan.paths.shape[1]] = root + torch.from_numpy(plan.paths)
    index = (root + node).long()
    return RowTables(
        root + depth,
        pages[index // PAGE_SIZE] * PAGE_SIZE + (index % PAGE_SIZE).int(),
        root + contiguous,
        None if shape.is_chain else paths,
        first.contiguous(),
        (len(shape) - first).clamp(max=height),
        torch.zeros_like(first),
        pages.contiguous(),
        UniformRows(len(first), len(shape), settled=True),
    )


def run_tree(
    reference: Reference, shape: Any, hidden: torch.Tensor, root: int, kv: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The residual streams of all rows, each by a run along its path; `kv` gets its key and value."""
    outputs, context = [], [own.clone() for own in kv]
    for node in range(len(shape)):
        keys, values = (own.clone() for own in context)
        for depth, ancestor in enumerate(shape.path(node)):
            output = reference.run(hidden[ancestor], root + depth, keys, values)
        for own, along in zip(kv, (keys, values), strict=True):
            own[:, root + node] = along[:, root + depth]
        outputs.append(output)
    return torch.stack(outputs)


@needs_compiler
@pytest.mark.parametrize(
    ("config", "root", "parents"),
    [
        pytest.param(DENSE, 69, CHAIN[:2], id="dense", marks=REPEATS),
        pytest.param(NORMED, 130, CHAIN[:1], id="norms", marks=REPEATS),
        # the second row begins a block
        pytest.param(NORMED, 63, CHAIN, id="norms of rows"),
        pytest.param(MIXTURE, 0, CHAIN[:1], id="first row", marks=REPEATS),
        # the row ends a block
        pytest.param(MIXTURE, 127, CHAIN[:1], id="mixture"),
        # the row begins a block
        pytest.param(FOUR, 64, CHAIN[:1], id="four experts", marks=REPEATS),
        # nodes before and after the end of a block, and positions, too
        pytest.param(SHARED_KEYS, 62, TREE, id="tree"),
        # nodes only
        pytest.param(NORMED_KEYS, 59, TREE, id="normed tree", marks=REPEATS),
    ],
)
def test_the_megakernel_computes_the_layers(
    config: ModelConfig, root: int, parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.decode.draft_shape import DraftShape
    from paceline.backends.cuda.native import persistent
    from paceline.backends.cuda.passes.kv_pool import Pool
    from paceline.backends.cuda.passes.workspace import Room, make_workspace

    tensors, weights = weights_of(config)
    tree, rows = DraftShape(parents), len(parents)
    generator = torch.Generator().manual_seed(root)
    pages = torch.randperm(LONGEST // PAGE_SIZE, generator=generator).int()
    tables = tables_of(root, tree, pages, config)
    workspace = make_workspace(weights, Room.of(rows, LONGEST))
    shape = (config.num_layers, LONGEST, config.num_kv_heads, config.head_dim)
    keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    pool = Pool(LONGEST // PAGE_SIZE, 0, keys, values)
    sizes = persistent.kernel_sizes(weights, tables, PAGE_SIZE, workspace.attention.blocks, PROGRAMS, SHARED)
    assert sizes is not None
    files = [
        HERE / "emulated_persistent.h" if own == "persistent_instructions" else own
        for own in persistent.SOURCES
    ]
    kernel = Emulated(files, "run_persistent_layers", "Pass", sizes, 1, persistent.THREADS)
    monkeypatch.setattr(persistent, "_compile", lambda *known: None)
    own = persistent._Pass(sizes, weights, workspace, tables, pool, None, ())

    slots = pages[torch.arange(LONGEST) // PAGE_SIZE].long() * PAGE_SIZE + torch.arange(LONGEST) % PAGE_SIZE
    expected_keys, expected_values = keys[:, slots].float(), values[:, slots].float()
    hidden = torch.randn((rows, config.hidden_size), generator=generator)
    norm = tensors["model.layers.0.input_layernorm.weight"]
    reference = Reference(config, tensors, weights.layers[0].rotation)
    expected = run_tree(reference, tree, hidden, root, (expected_keys, expected_values))
    for _ in range(2):  # other threads rest the second time
        workspace.hidden[:rows] = hidden
        workspace.attention_input.rows[:rows] = (hidden * norm).bfloat16()
        workspace.attention_input.squares[:rows] = hidden.square().view(rows, -1, 64).sum(-1)
        keys[:, slots[root : root + rows]] = torch.nan
        kernel.launch(own._addresses.numpy().tobytes(), (PROGRAMS, 1, 1), (1, 1), persistent.THREADS)
        torch.testing.assert_close(workspace.hidden[:rows], expected, atol=0.03, rtol=0.01)
        torch.testing.assert_close(keys[:, slots].float(), expected_keys, atol=0.03, rtol=0.01)
        torch.testing.assert_close(values[:, slots].float(), expected_values, atol=0.03, rtol=0.01)
