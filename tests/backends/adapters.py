"""Random LoRA adapters of any model, and requests that have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.backends.base import Backend
from paceline.models.config import ModelConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.lora import MODULE, Adapter, LoraMatrix
from tests.backends.driver import Driven, drive, run

MODULES = {
    "a": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"),
    "b": ("self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}
RANKS = {"a": 3, "b": 20}


def random_adapters(config: ModelConfig, scale: float = 0.2, everywhere: bool = False) -> list[Adapter]:
    """Two adapters, of different modules and ranks; those of experts' layers change attention alone.

    `everywhere`: one of all matrices that an adapter may change, and one of every second.
    """
    shapes, generator = dict(expected_tensors(config)), np.random.default_rng(7)

    def matrix(module: str, rank: int) -> LoraMatrix:
        outputs, inputs = shapes[f"{module}.weight"]
        sides = generator.standard_normal((rank, inputs)), generator.standard_normal((outputs, rank))
        return LoraMatrix(*((scale * side).astype(np.float32) for side in sides))

    def all_of(name: str) -> dict[str, LoraMatrix]:
        if everywhere:
            found = [own.removesuffix(".weight") for own in shapes]
            modules = [own for own in found if MODULE.fullmatch(own)][:: 1 + (name == "b")]
            return {own: matrix(own, RANKS[name]) for own in modules}
        modules = [f"model.layers.{own}.{part}" for own in range(config.num_layers) for part in MODULES[name]]
        return {own: matrix(own, RANKS[name]) for own in modules if f"{own}.weight" in shapes}

    return [Adapter(name, all_of(name)) for name in MODULES]


def drive_with(backend: Backend, pages_each: int, names: Sequence[str]) -> list[Driven]:
    """A request for each of these adapters."""
    requests = drive(backend, pages_each, len(names))
    for request, name in zip(requests, names, strict=True):
        request.adapter = name
    return requests


def extend_all(requests: Sequence[Driven], tokens: Sequence[int]) -> np.ndarray:
    """Logits [requests, tokens, vocab] of the same chain of all requests, run together and committed."""
    logits = run([request.ask(tokens) for request in requests]).logits.copy()
    for request in requests:
        request.commit(range(len(tokens)))
    return logits.reshape(len(requests), len(tokens), -1)
