"""Pathwise verification: follow the target's own choices down the draft for as long as they meet.

At each node the target's token is a pure function of the node's logits and the noise of its
position, so the draft decides only how many of these tokens one pass yields, never which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.verify.logprobs import Logprob, token_logprobs
from paceline.verify.sampling import Sampler, Workspace


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a pass decided for one request."""

    accepted: tuple[int, ...]  # nodes of the draft on the target's path, from the root down
    tokens: tuple[int, ...]  # their tokens and the bonus token; empty for a chunk that ends inside a prompt
    logprobs: tuple[dict[int, Logprob], ...] = ()  # one per token, if asked
    error: Exception | None = None  # the request cannot go on


NOTHING = Verdict((), ())


def verify_pathwise(
    logits: npt.NDArray[np.float32],  # [1 + nodes, vocab] of the root, then of each node
    draft_tokens: Sequence[int],
    draft_parents: Sequence[int],
    sampler: Sampler,
    position: int,
    num_output: int,
    is_last: Callable[[int, int], bool],
    num_logprobs: int | None,
    workspace: Workspace,
) -> Verdict:
    """The accepted path and its tokens. `position` is that of the first new token.

    `is_last(token, outputs before it)` says that the request ends with the token: nothing below it
    is looked at, so an accepted end-of-sequence inside a draft ends the walk.
    """
    accepted: list[int] = []
    tokens: list[int] = []
    logprobs: list[dict[int, Logprob]] = []
    node = -1
    while True:
        depth = len(tokens)
        row = logits[node + 1]
        token = sampler.sample(row, position + depth, num_output + depth, workspace)
        sampler.advance(token)
        tokens.append(token)
        if num_logprobs is not None:
            logprobs.append(token_logprobs(row, token, num_logprobs))
        if is_last(token, num_output + depth):
            break
        child = _child(draft_tokens, draft_parents, node, token)
        if child is None:
            break
        accepted.append(child)
        node = child
    return Verdict(tuple(accepted), tuple(tokens), tuple(logprobs))


def _child(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
    """The child of `node` that holds `token`. Children come after their parent."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return None
