"""The activations of gated MLPs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def activated(gate, up, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    """What ACTIVATIONS of models/blocks.py gives of this name: silu, gelu_tanh or clamped_silu."""
    if activation == "gelu_tanh":  # tanh as a sigmoid of twice its argument; 1.596 is 2 * sqrt(2 / pi)
        cubed = gate + 0.044715 * gate * gate * gate
        return gate / (1.0 + tl.exp(-1.5957691216057308 * cubed)) * up
    if activation == "clamped_silu":
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up
