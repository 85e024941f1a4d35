"""A mixture of experts is the torch backend's, and a row's part of it does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.nn.functional as F

from paceline.models.config import ModelConfig, MoeConfig, RopeConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.transformer.blocks import FeedForward
from paceline.models.transformer.experts import MixtureOfExperts
from paceline.models.transformer.model import Transformer

if TYPE_CHECKING:
    from paceline.backends.cuda.kernels.products.matrix import Normed

EPS, EXPERTS, MAX_ROWS = 1e-5, 6, 128


class Case:
    """A random layer of a mixture, and rows of a residual stream that it reads."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        chosen: int,
        normalize: bool,
        packing: str = "none",
        activation: str = "silu",
        size: tuple[int, int] | None = None,
        experts: int = EXPERTS,
        **of_moe: Any,
    ) -> None:
        from paceline.backends.cuda.kernels.experts.routing import routing_for
        from paceline.backends.cuda.kernels.products.matrix import scratch_for
        from paceline.backends.cuda.weights.model_weights import load_weights
        from paceline.backends.cuda.weights.tiled import matrix

        torch.manual_seed(7)
        hidden, width = size or ((60, 37) if packing == "none" else (128, 128))
        moe = MoeConfig(experts, chosen, width, normalize, frozenset([0]), **of_moe)
        sizes = 64, hidden, 1, 2, 1, 16, 1
        self.config = config = ModelConfig(
            "mixtral", *sizes, EPS, RopeConfig(), 16, True, moe=moe, activation=activation
        )
        self.weights = {
            name: (torch.ones(shape) if "norm" in name else torch.randn(shape) / 8).to(device, dtype)
            for name, shape in expected_tensors(config)
        }
        reference = Transformer(config, lambda name: self.weights[name].float()).layers[0].feed_forward
        self.reference = cast(MixtureOfExperts, reference)
        mixture = load_weights(config, self.weights.__getitem__, lambda name: packing).layers[0].mixture
        assert mixture is not None
        self.mixture = mixture
        self.size, self.padded = hidden, mixture.gate_up.depth
        self.hidden = F.pad(torch.randn(MAX_ROWS, hidden), (0, self.padded - hidden)).to(device)
        self.norm = torch.randn(self.padded).to(device, dtype)
        self.routing = routing_for(mixture, MAX_ROWS, dtype, device)
        self.nothing = matrix(torch.zeros((hidden, 64), dtype=dtype, device=device), None)
        self.scratch = scratch_for([self.nothing], MAX_ROWS, device)

    def run(self, rows: Sequence[int], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The residual stream of these rows, then what the next norm reads and its sums of squares.

        What experts read is written by the kernel that adds to the stream, with parts of scores of few rows.
        """
        from paceline.backends.cuda.kernels.experts.grouped import add_experts
        from paceline.backends.cuda.kernels.experts.router import Scores, has_parts
        from paceline.backends.cuda.kernels.products.linear import add_product

        count, mixture = len(rows), self.mixture
        hidden = self.hidden[[*rows, *[0] * (MAX_ROWS - count)]]
        read, written = self._normed(), self._normed()
        slot_mapping = torch.tensor([*range(count), *[-1] * padding], dtype=torch.int32, device=hidden.device)
        early = has_parts(mixture.router, len(slot_mapping))
        scores = Scores(mixture.router, self.routing.parts) if early else None
        inputs, ones = read.rows.new_zeros((MAX_ROWS, 64)), torch.ones_like(self.norm)
        filled = len(slot_mapping), self.scratch, None, scores
        add_product(inputs, self.nothing, hidden, ones, read, *filled)
        add_experts(mixture, read, slot_mapping, hidden, self.norm, written, self.routing, early)
        assert not self.routing.counts.any()
        return hidden[:count], written.rows[:count], written.squares[:count]

    def _normed(self) -> Normed:
        from paceline.backends.cuda.kernels.products.matrix import Normed

        squares = self.hidden.new_zeros((MAX_ROWS, self.padded // 64))
        return Normed(self.norm.new_zeros(self.hidden.shape), squares, self.size, EPS)

    def expected(self, rows: Sequence[int]) -> torch.Tensor:
        return self.behind(self.reference, rows)

    def behind(self, block: FeedForward, rows: Sequence[int]) -> torch.Tensor:
        """The residual stream of these rows with what a block of the torch backend adds to it."""
        own = self.hidden[list(rows), : self.size]
        rounded = own.to(self.norm.dtype).float()  # or near ties would choose other experts
        added = block(F.rms_norm(rounded, (self.size,), eps=EPS))
        return F.pad(own + added, (0, self.padded - self.size))


def near(got: torch.Tensor, expected: torch.Tensor, least: float = 5e-3) -> None:
    assert float((got.float() - expected).norm() / expected.norm()) < least


@pytest.mark.parametrize(("chosen", "normalize"), [(2, True), (3, True), (2, False)])
def test_a_mixture_is_that_of_torch(
    chosen: int, normalize: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Those of mixtral, of qwen3-moe, and of qwen3-moe with raw weights."""
    case, rows = Case(device, dtype, chosen, normalize), range(6)
    hidden, normed, squares = case.run(rows)
    near(hidden, case.expected(rows))
    near(normed, case.expected(rows) * case.norm.float())
    near(squares.sum(-1), case.expected(rows).square().sum(-1))


@pytest.mark.parametrize(
    ("activation", "of_moe"),
    [
        ("clamped_silu", {"biases": True}),
        (
            "silu",
            {"scoring": "sigmoid", "correction_bias": True, "weight_scale": 1.5}
            | {"groups": 3, "chosen_groups": 2},
        ),
        ("gelu_tanh", {"scoring": "sigmoid"}),
        ("silu", {"shared_intermediate_size": 37, "shared_gate": True}),
        ("silu", {"shared_intermediate_size": 74, "weight_scale": 2.0}),
        ("silu", {"scoring": "sigmoid", "shared_intermediate_size": 37, "scaled_inputs": True}),
        ("relu2", {"scoring": "sigmoid", "correction_bias": True, "shared_intermediate_size": 37}),
    ],
    ids=["gpt-oss", "glm4-moe", "sigmoid alone", "qwen3-next", "deepseek-v2", "llama4", "nemotron-h"],
)
def test_routers_and_experts_of_other_families_are_those_of_torch(
    activation: str, of_moe: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    case = Case(device, dtype, 3, True, activation=activation, **of_moe)
    near(case.run(range(6))[0], case.expected(range(6)))
    near(case.run([4])[0], case.expected([4]))  # a row alone


def test_weights_of_experts_may_have_factors(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in gemma4, after they are normalized."""
    case, factors = Case(device, dtype, 2, True), torch.rand(EXPERTS, device=device) + 0.5
    case.mixture, route = replace(case.mixture, factors=factors), case.reference._route

    def scaled(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = route(hidden)
        return weights * factors[chosen], chosen

    monkeypatch.setattr(case.reference, "_route", scaled)
    near(case.run(range(6))[0], case.expected(range(6)))


@pytest.mark.parametrize("shared", [0, 74])
def test_rows_give_the_same_alone_and_among_others(
    shared: int, device: torch.device, dtype: torch.dtype
) -> None:
    case = Case(device, dtype, 3, shared == 0, shared_intermediate_size=shared)
    together = case.run(range(MAX_ROWS if torch.cuda.is_available() else 5))
    for row, padding in ((0, 1), (4, 0)):
        for got, expected in zip(case.run([row], padding=padding), together, strict=True):
            if torch.cuda.is_available():
                assert torch.equal(got[0], expected[row])
            else:  # numpy multiplies, and sums as it likes
                near(got[0], expected[row].float(), 1e-3)


def test_ties_go_to_the_first_experts_whose_rows_fill_several_blocks(
    device: torch.device, dtype: torch.dtype
) -> None:
    case, rows = Case(device, dtype, 2, True), range(17)
    case.mixture.router.weight.zero_()
    first, second = (case.behind(case.reference.experts[expert], rows) for expert in (0, 1))
    near(case.run(rows)[0], (first + second) / 2)
    blocks = [block for block in zip(*case.routing.blocks.tolist(), strict=True) if block[2]]
    assert blocks == [(0, 0, 16), (0, 16, 1), (1, 0, 16), (1, 16, 1)]


def test_padding_and_nan_rows_do_not_affect_other_rows(device: torch.device, dtype: torch.dtype) -> None:
    case = Case(device, dtype, 3, True)
    case.hidden[1] = torch.nan
    hidden, _, _ = case.run([0, 1, 2], padding=5)
    near(hidden[[0, 2]], case.expected([0, 2]))
    assert hidden[1].isnan().all()
    assert case.routing.blocks[2].sum() == 3 * 3
    case.run([], padding=1)  # alone
    assert not case.routing.blocks[2, :3].any()


def test_many_experts_are_scored_alike_in_few_rows_and_in_many(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Parts of the scores of 131 columns, and scores at once."""
    case = Case(device, dtype, 3, True, experts=130, shared_intermediate_size=37, shared_gate=True)
    together = case.run(range(MAX_ROWS if torch.cuda.is_available() else 65))
    few = case.run(range(2))
    near(few[0], case.expected(range(2)))
    for got, expected in zip(few, together, strict=True):
        if torch.cuda.is_available():
            assert torch.equal(got, expected[:2])
        else:
            near(got, expected[:2].float(), 1e-3)


def test_router_scores_may_be_a_separate_kernel(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.kernels.experts import router

    case = Case(device, dtype, 3, True, experts=130)
    together = case.run(range(3))
    monkeypatch.setattr(router, "MAX_PARTS", 0)
    for rows in ([0, 1, 2], [2]):
        for got, expected in zip(case.run(rows), together, strict=True):
            assert torch.equal(got, expected[rows])
        assert not case.routing.arrivals.any()


@pytest.mark.parametrize(("kilobytes", "stages"), [(227, 8), (99, 6)])
def test_the_router_of_many_rows_fits_in_shared_memory(
    kilobytes: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of Hopper, and of smaller GPUs."""
    from paceline.backends.cuda.kernels.experts import router

    monkeypatch.setattr(router, "shared_bytes", lambda device: kilobytes << 10)
    assert router.stages_for(64, torch.zeros(1, dtype=torch.bfloat16)) == stages
    assert stages * (64 * 64 + 64 * 64) * 2 <= kilobytes << 10


def test_a_shared_expert_is_stacked_with_the_others_if_it_is_packed_as_they_are(
    device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.weights.model_weights import load_weights

    def packed(name: str) -> str:
        return "int8" if "shared_experts.down_proj" in name else "none"

    case = Case(device, dtype, 2, True, "none", size=(128, 128), shared_intermediate_size=256)
    assert (case.mixture.shared, case.mixture.chosen) == (2, 4)
    layer = load_weights(case.config, case.weights.__getitem__, packed).layers[0]
    assert layer.mixture is not None
    assert layer.shared is not None
    assert layer.mixture.shared == 0
    assert layer.shared[1].tiling.packing == "int8"


def test_shared_experts_are_stacked_in_all_layers_or_in_none(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Layers share the buffers of their mixtures, which the first one's sizes decide."""
    from paceline.backends.cuda.weights.model_weights import load_weights

    def packed(name: str) -> str:
        return "int8" if "layers.0.mlp.shared_experts.down_proj" in name else "none"

    config = Case(device, dtype, 2, True, "none", size=(128, 128), shared_intermediate_size=256).config
    assert config.moe is not None
    config = replace(config, num_layers=2, moe=replace(config.moe, layers=frozenset([0, 1])))
    weights = {name: torch.zeros(shape).to(device, dtype) for name, shape in expected_tensors(config)}
    layers = load_weights(config, weights.__getitem__, packed).layers
    assert [layer.mixture.shared for layer in layers if layer.mixture] == [0, 0]
    assert all(layer.shared is not None for layer in layers)


@pytest.mark.parametrize(("packing", "error"), [("int8", 0.02), ("fp8", 0.06)])
def test_experts_may_be_packed(packing: str, error: float, device: torch.device, dtype: torch.dtype) -> None:
    case, rows = Case(device, dtype, 2, True, packing), range(3)
    assert case.mixture.gate_up.tiling.packing == packing
    assert case.mixture.down.tiling.packing == packing
    own = case.hidden[:3].clone()
    near(case.run(rows)[0] - own, case.expected(rows) - own, error)
