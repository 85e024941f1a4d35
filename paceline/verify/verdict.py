"""The input of an acceptance rule (Case) and its result (Verdict)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.arrays import Float32Array
from paceline.core.sampling import SamplingState
from paceline.core.trees import Draws
from paceline.core.verdict import Verdict
from paceline.verify.sampling import Sampler


@dataclass(slots=True)  # not frozen: there is one for each request of every pass
class Case:
    """One request's draft after the target's pass over it. Without nodes it is plain decoding.

    Immutable by convention.
    """

    logits: Float32Array  # [1 + nodes, vocab] of the root, then of each node
    tokens: Sequence[int]  # [nodes]
    parents: Sequence[int]  # [nodes] -1 for the root's children
    draws: Draws | None  # the distributions that nodes were sampled from; None: all were chosen
    sampling: SamplingState  # at the end of the request's path; the rule advances it along the new tokens
    position: int  # of the first new token
    num_output: int  # tokens of output before it
    is_last: Callable[[int, int], bool]  # (token, outputs before it): whether the request ends with it
    num_logprobs: int | None
    # [1 + nodes] the tokens that the backend has sampled, -1 for unusable logits; then `logits` is empty
    chosen: Sequence[int] | None = None


# One verdict for each case. Unusable logits are the error of their own case only.
Rule = Callable[[Sequence[Case], Sampler], list[Verdict]]
