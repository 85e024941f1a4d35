"""Queries, keys and values of latent attention are those of transformer/latent.py, for any number of rows."""

from __future__ import annotations

import pytest
import torch

from paceline.models.config import LatentConfig, ModelConfig, RopeConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.quantizations import is_packed
from paceline.models.transformer.attention import rotate
from paceline.models.transformer.latent import LatentProjections

HIDDEN, HEADS, SLOTS, EPS = 40, 6, 32, 1e-5
LATENTS = {
    "queries": LatentConfig(rank=18, query_rank=0, rope_dim=10, nope_dim=14, value_dim=9),
    "latents of queries": LatentConfig(18, 24, 10, 14, 9, biases=True),
    "more than a step": LatentConfig(rank=160, query_rank=70, rope_dim=16, nope_dim=24, value_dim=70),
}


class Case:
    """A random layer with latent attention, and rows that it reads."""

    def __init__(self, latent: LatentConfig, device: torch.device, dtype: torch.dtype) -> None:
        from paceline.backends.cuda.weights.model_weights import load_weights

        torch.manual_seed(5)
        size = latent.rope_dim + latent.rank
        self.config = ModelConfig(
            "deepseek_v3",
            *(64, HIDDEN, 1, HEADS, 1, size, 48, EPS, RopeConfig(dim=latent.rope_dim), 64, True),
            output_bias=latent.biases,
            attention_scale=0.2,
            latent=latent,
        )
        weights = {
            name: (torch.rand(shape) + 0.5 if "norm" in name else torch.randn(shape) / 4).to(device, dtype)
            for name, shape in expected_tensors(self.config)
        }
        self.reference = LatentProjections(
            lambda name: weights[name].float().cpu(), "model.layers.0.self_attn", self.config, latent
        )
        self.weights, self.latent = load_weights(self.config, weights.__getitem__), latent
        self.normed = torch.randn(SLOTS, HIDDEN).to(device, dtype)

    def project(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries [rows, heads, rope + rank] of these rows, and all keys [slots, 1, rope + rank]."""
        from paceline.backends.cuda.kernels.residual import plain
        from paceline.backends.cuda.layers.latent import project_latents
        from paceline.backends.cuda.passes.tables import DeviceTables
        from paceline.backends.cuda.passes.workspace import Room, make_workspace

        normed, count, device = self.normed[rows], rows.stop - rows.start, self.normed.device
        workspace, layer = make_workspace(self.weights, Room.of(count, 64)), self.weights.layers[0]
        workspace.attention_input.rows[:count, :HIDDEN] = normed
        read = plain(workspace.attention_input.rows, torch.ones(len(workspace.query), 1, device=device))
        tables = DeviceTables(count, 1, device).tables(count)
        tables.positions[:] = torch.arange(rows.start, rows.stop)
        tables.slot_mapping[:] = torch.arange(rows.start, rows.stop).flip(0)
        tables.slot_mapping[0] = -1
        keys = torch.full((SLOTS, 1, self.config.head_dim), 7.0, dtype=normed.dtype, device=device)
        assert layer.latent is not None
        assert layer.rotation is not None
        assert workspace.latent is not None
        known = layer.qkv, layer.latent, layer.rotation, tables, workspace.latent
        project_latents(read, *known, workspace.query, keys, workspace.scratch)
        return workspace.query[:count].cpu(), keys.cpu()

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        """The values [rows, heads, value] of mixed latents [rows, heads, rank]."""
        from paceline.backends.cuda.layers.latent import project_values
        from paceline.backends.cuda.passes.workspace import Room, make_workspace

        count, device = len(mixed), self.normed.device
        workspace, layer = make_workspace(self.weights, Room.of(count, 64)), self.weights.layers[0]
        assert layer.latent is not None
        assert workspace.latent is not None
        workspace.latent.mixed[:count] = mixed.flatten(1)
        positions = torch.zeros(count, dtype=torch.int32, device=device)
        project_values(layer.latent, workspace.latent, workspace.attention_output, positions)
        used = HEADS * self.latent.value_dim
        assert not workspace.attention_output[:, used:].any()
        return workspace.attention_output[:count, :used].view(count, HEADS, -1).cpu()


@pytest.mark.parametrize("kind", LATENTS)
def test_the_products_around_attention_are_those_of_torch(
    kind: str, device: torch.device, dtype: torch.dtype
) -> None:
    case = Case(LATENTS[kind], device, dtype)
    rows, layer = slice(3, 24), case.weights.layers[0]
    assert layer.rotation is not None
    rotation = tuple(part[rows][:, None].cpu() for part in layer.rotation)
    normed = case.normed[rows].float().cpu()
    queries, keys = case.project(rows)
    expected = rotate(case.reference.queries(normed), rotation)  # type: ignore[arg-type]
    torch.testing.assert_close(queries.float(), expected, rtol=2e-2, atol=5e-2)
    expected = rotate(case.reference.keys(normed), rotation)  # type: ignore[arg-type]
    slots = torch.arange(rows.start, rows.stop).flip(0)[1:]  # the first row is padding
    torch.testing.assert_close(keys[slots].float(), expected[1:], rtol=2e-2, atol=2e-2)
    others = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert (keys[others] == 7).all()

    mixed = torch.randn(21, HEADS, case.latent.rank).to(device, dtype)
    expected = case.reference.values(mixed.float().cpu())
    torch.testing.assert_close(case.values(mixed).float(), expected, rtol=2e-2, atol=5e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter sums as it likes")
@pytest.mark.parametrize("kind", LATENTS)
def test_a_row_has_the_same_bits_among_others(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    case = Case(LATENTS[kind], device, dtype)
    queries, keys = case.project(slice(0, SLOTS))
    mixed = torch.randn(SLOTS, HEADS, case.latent.rank).to(device, dtype)
    values = case.values(mixed)
    for rows in (slice(7, 9), slice(2, 25)):
        some, some_keys = case.project(rows)
        assert torch.equal(some, queries[rows])
        at = torch.arange(rows.start + 1, rows.stop)  # slots are given in the opposite order
        whole = torch.arange(0, SLOTS).flip(0)
        assert torch.equal(some_keys[torch.arange(rows.start, rows.stop).flip(0)[1:]], keys[whole[at]])
        assert torch.equal(case.values(mixed[rows]), values[rows])


def test_the_matrices_of_heads_are_not_packed(dtype: torch.dtype) -> None:
    """All others of the layer are, where they have whole steps."""
    from paceline.backends.cuda.weights.model_weights import load_weights

    latent = LatentConfig(rank=64, query_rank=128, rope_dim=16, nope_dim=24, value_dim=32)
    sizes = (64, 256, 1, 4, 1, 80, 256, EPS, RopeConfig(dim=16), 64, True)
    config = ModelConfig("deepseek_v3", *sizes, latent=latent)
    shapes = dict(expected_tensors(config))

    def take(name: str) -> torch.Tensor:
        return torch.ones(shapes[name], dtype=torch.float32 if is_packed(name) else dtype)

    (layer,) = load_weights(config, take, lambda name: "fp8_blocks").layers
    assert layer.latent is not None
    assert layer.latent.query is not None
    packed = (layer.qkv, layer.latent.query, layer.output, layer.gate_up, layer.down)
    assert [own.tiling.packing for own in packed] == ["fp8_blocks"] * 5
    assert {own.weight.dtype for own in (layer.latent.to_latents, layer.latent.to_values)} == {dtype}
