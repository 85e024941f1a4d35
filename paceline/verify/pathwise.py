"""Pathwise verification: follow the target's own tokens down the draft tree for as long as they match.

At each node the target's token is a pure function of the node's logits and the noise of its position, so
the draft decides only how many tokens a pass yields, never which.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.verdict import Logprob, Verdict
from paceline.errors import BackendError
from paceline.verify.logprobs import token_logprobs
from paceline.verify.sampling import Sampler, unusable_logits
from paceline.verify.verdict import Case


def verify_pathwise(cases: Sequence[Case], sampler: Sampler) -> list[Verdict]:
    """The accepted path and its tokens, for each case."""
    verdicts = []
    for case in cases:
        try:
            verdicts.append(_walk(case, sampler))
        except BackendError as error:
            verdicts.append(Verdict((), (), error=error))
    return verdicts


def _walk(case: Case, sampler: Sampler) -> Verdict:
    """The verdict on one case. An accepted token that ends the request, inside a draft, ends the walk."""
    accepted: list[int] = []
    tokens: list[int] = []
    logprobs: list[dict[int, Logprob]] = []
    node = -1
    while True:
        depth = len(tokens)
        token = _token(case, node, depth, sampler)
        case.sampling.advance(token)
        tokens.append(token)
        if case.num_logprobs is not None:
            logprobs.append(token_logprobs(case.logits[node + 1], token, case.num_logprobs))
        child = _child(case.tokens, case.parents, node, token)
        if child is not None:
            accepted.append(child)
        if child is None or case.is_last(token, case.num_output + depth):
            break
        node = child
    return Verdict(tuple(accepted), tuple(tokens), tuple(logprobs))


def _token(case: Case, node: int, depth: int, sampler: Sampler) -> int:
    """The target's token after a node at this depth: sampled here, or already by the backend."""
    position = case.position + depth
    if case.chosen is None:
        return sampler.sample(case.sampling, case.logits[node + 1], position, case.num_output + depth)
    token = case.chosen[node + 1]
    if token < 0:
        raise unusable_logits(f"at position {position}")
    return token


def _child(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
    """The child of `node` that holds `token`. Children come after their parent."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return None
