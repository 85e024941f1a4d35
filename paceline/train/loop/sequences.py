"""The target over whole documents at once: the weights of the reference transformer, without pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F

from paceline.errors import UnsupportedModelError
from paceline.models.checkpoint import Checkpoint
from paceline.models.transformer.attention import Heads, Rotation
from paceline.models.transformer.layer import Layer
from paceline.models.transformer.model import Transformer
from paceline.train.loop.attention import packed_attention
from paceline.train.loop.batches import Batch

# From layer, queries [batch, tokens, heads, head_dim], keys and values [batch, tokens, kv_heads, head_dim]
# to outputs in the shape of the queries.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Before = Callable[[Layer, torch.Tensor, Rotation | None], Heads]
After = Callable[[Layer, torch.Tensor, torch.Tensor], torch.Tensor]
LOGITS_AT_ONCE = {"cuda": 1 << 28, "cpu": 1 << 24}  # logits per chunk: 1 GB, 64 MB
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TargetStates:
    """The target's hidden states for every token of a packed batch."""

    features: torch.Tensor  # [1, tokens, features * hidden] selected hidden states, concatenated
    final: torch.Tensor  # [1, tokens, hidden] after the final norm; times the output weights, the logits
    best: torch.Tensor  # int64 [1, tokens] the most likely next token; before the answers, any


def load_target(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The checkpoint's transformer on a device, if it has no blocks that training does not know."""
    if blocks := checkpoint.config.beyond_llama():
        raise UnsupportedModelError(
            f"This {checkpoint.config.family} model has {', '.join(blocks)}, and heads are trained only for "
            "models without them. Serve it with ngram, suffix or a draft model, which need no training."
        )

    def take(name: str) -> torch.Tensor:
        return torch.from_numpy(checkpoint.tensors[name].float32()).to(device=device, dtype=dtype)

    return Transformer(checkpoint.config, take)


@torch.no_grad()
def target_states(model: Transformer, batch: Batch, feature_layers: Sequence[int]) -> TargetStates:
    """The states of a batch.

    Feature layers are indices of hidden states: 0 is the embedding, i the output of layer i - 1.
    """

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return packed_attention(batch, query, key, value, model.config.window(layer))

    last, features = run_layers(model, batch.tokens, batch.positions, attend, feature_layers)
    final = model.norm(last)
    best = best_tokens(model, final, (batch.since_answer >= 0)[None])
    return TargetStates(torch.cat(features, dim=-1), final, best)


def best_tokens(model: Transformer, final: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The most likely next tokens where they are `wanted` [batch, tokens], 0 elsewhere."""
    rows = max(1, LOGITS_AT_ONCE[final.device.type] // len(model.head))
    parts = [F.linear(part, model.head).argmax(-1) for part in torch.split(final[wanted], rows)]
    best = torch.zeros_like(wanted, dtype=torch.int64)
    best[wanted] = torch.cat(parts)
    return best


def run_layers(
    model: Transformer,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    attend: Attend,
    wanted: Sequence[int],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The last layer's output [batch, tokens, hidden] before the final norm, and the `wanted` hidden states.

    `attend` computes attention; positions is [tokens].
    """
    # MoE layers index rows by expert, which torch.compile cannot fuse
    before, after = _stages(compiled=model.embedding.is_cuda and model.config.moe is None)
    rotations = model.rotations(positions)
    hidden = model.embed(tokens)
    states = {0: hidden}
    for index, layer in enumerate(model.layers):
        mixed = attend(index, *before(layer, hidden, rotations[model.config.rope_of(index)]))
        hidden = after(layer, hidden, mixed)
        if index + 1 in wanted:
            states[index + 1] = hidden
    return hidden, [states[index] for index in wanted]


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function compiled for a GPU into few fused kernels, for arguments of any length."""
    from torch._dynamo import config as tracing
    from torch._inductor import config as compiling

    # Kernels must not depend on which shapes came first or on autotuning: a resumed run sees others.
    compiling.deterministic = True
    tracing.recompile_limit = 64
    return torch.compile(function, dynamic=True)


@cache
def _stages(compiled: bool) -> tuple[Before, After]:
    """The parts of a layer before and after its attention."""
    return (fused(Layer.before), fused(Layer.after)) if compiled else (Layer.before, Layer.after)
