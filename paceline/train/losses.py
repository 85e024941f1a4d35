"""How far guesses are from what the target says: what a head is trained to make small.

Each takes guesses [..., draft vocabulary], as logits, and the target's distribution over the same tokens,
and gives one number for each row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]

HASTE = 3.0  # how soon the hybrid turns from divergence to overlap as they come together


def cross_entropy(guesses: Tensor, wanted: Tensor) -> Tensor:
    """The usual one: least where the distributions are the same."""
    return guesses.logsumexp(-1) - (guesses * wanted).sum(-1)


def lk_hybrid(guesses: Tensor, wanted: Tensor) -> Tensor:
    """A mixture of the divergence, which teaches from afar, and of the chance that a drawn guess is refused.

    That chance, 1 - sum(min(p, q)), is what costs time at temperature 1, but far from the target it has
    hardly a gradient. So its share grows with the overlap that is already reached.
    """
    logarithms = guesses.log_softmax(-1)
    overlap = torch.minimum(wanted, logarithms.exp()).sum(-1)
    divergence = (torch.xlogy(wanted, wanted) - wanted * logarithms).sum(-1)
    share = (-HASTE * overlap.detach()).exp()
    return share * divergence + (1 - share) * (1 - overlap)


LOSSES: dict[str, Loss] = {"kl": cross_entropy, "lk": lk_hybrid}
