"""The classic acceptance rules: the target's distribution, though not the bytes of plain decoding.

    rejection    speculative sampling (Leviathan et al., Chen et al. 2023), with several candidates per level
    block        block verification (Sun et al. 2024), chains only
    traversal    traversal verification (Weng et al. 2025): block verification for trees

`rule_kernels.py` decides. Everything around it is shared: the target's distribution at each node along the
node's own path, fresh noise for every decision, and the tokens of the accepted path. Rejection descends
level by level and needs the distributions of the accepted path only; the other two look at whole paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.core.verdict import Verdict
from paceline.errors import BackendError
from paceline.verify.kernels import uniforms
from paceline.verify.logprobs import token_logprobs
from paceline.verify.noise import STREAM_ACCEPT, STREAM_RESIDUAL, lane
from paceline.verify.pathwise import verify_pathwise
from paceline.verify.rule_kernels import BLOCK, REJECTION, TRAVERSAL, decide
from paceline.verify.sampling import Sampler
from paceline.verify.verdict import Case

VerifyGroup = Callable[[Sequence[Case], Sampler], list[Verdict]]

_BUFFER_BYTES = 64 * 1024**2  # bytes of distributions per call of a rule, unless a single case needs more


def verify_rejection(cases: Sequence[Case], sampler: Sampler) -> list[Verdict]:
    """The verdicts of (multi-candidate) rejection sampling."""
    return _verify(_verify_by_level, cases, sampler)


def verify_block(cases: Sequence[Case], sampler: Sampler) -> list[Verdict]:
    """The verdicts of block verification. ValueError if a draft is not a chain."""
    for case in cases:
        if list(case.parents) != list(range(-1, len(case.parents) - 1)):
            raise ValueError(
                f"block verification takes chains only, got a tree: parents {list(case.parents)}"
            )
    return _verify(partial(_verify_whole, BLOCK), cases, sampler)


def verify_traversal(cases: Sequence[Case], sampler: Sampler) -> list[Verdict]:
    """The verdicts of traversal verification."""
    return _verify(partial(_verify_whole, TRAVERSAL), cases, sampler)


def _verify(verify_group: VerifyGroup, cases: Sequence[Case], sampler: Sampler) -> list[Verdict]:
    """One verdict for each case. Cases without a draft and greedy ones get the pathwise verdict."""
    verdicts: dict[int, Verdict] = {}
    drafted = [index for index, case in enumerate(cases) if len(case.tokens) and not case.sampling.greedy]
    plain = [index for index in range(len(cases)) if index not in set(drafted)]
    verdicts.update(zip(plain, verify_pathwise([cases[index] for index in plain], sampler), strict=True))
    for group in _groups(drafted, cases):
        verdicts.update(zip(group, verify_group([cases[index] for index in group], sampler), strict=True))
    return [verdicts[index] for index in range(len(cases))]


def _groups(indices: Sequence[int], cases: Sequence[Case]) -> Iterator[list[int]]:
    """Groups of cases that share one array of draft_probs and fit the buffer."""
    group: list[int] = []
    shared: Float64Array | None = None
    lines = 0
    for index in indices:
        case = cases[index]
        draft_probs = None if case.draws is None else case.draws.draft_probs
        lines += len(case.logits)
        apart = draft_probs is not None and shared is not None and draft_probs is not shared
        if group and (apart or lines * case.logits.shape[1] * 8 > _BUFFER_BYTES):
            yield group
            group, shared, lines = [], None, len(case.logits)
        group.append(index)
        shared = draft_probs if shared is None else shared
    if group:
        yield group


@dataclass
class ReachableDraft:
    """The nodes of a case's draft that a rule decides on. Lists are parallel."""

    case: Case
    nodes: list[int] = field(default_factory=list)  # of the draft, in order
    parents: list[int] = field(default_factory=list)  # indices into `nodes`, -1 for the root's children
    is_open: list[bool] = field(default_factory=list)  # whether a token may follow
    errors: dict[int, BackendError] = field(default_factory=dict)  # by index: its logits are unusable

    def path(self, index: int) -> list[int]:
        """The nodes from the root's child down to the node at this index."""
        nodes: list[int] = []
        while index >= 0:
            nodes.insert(0, self.nodes[index])
            index = self.parents[index]
        return nodes


def _verify_by_level(cases: Sequence[Case], sampler: Sampler) -> list[Verdict]:
    """One verdict for each case by rejection: the root's children first, then those of each accepted node."""
    verdicts: dict[int, Verdict] = {}
    paths: dict[int, list[int]] = {index: [] for index in range(len(cases))}  # accepted so far
    live = list(paths)
    while live:
        target_probs = sampler.lines(sum(len(cases[index].logits) for index in live))
        levels: dict[int, ReachableDraft] = {}
        filled = 0
        for index in live:
            try:
                levels[index] = _reachable_level(cases[index], paths[index], target_probs[filled], sampler)
                filled += 1 + len(levels[index].nodes)
            except BackendError as error:
                verdicts[index] = Verdict((), (), error=error)
        live = []
        decided = _decide(list(levels.values()), target_probs[:filled], REJECTION)
        for (index, level), (end, token) in zip(levels.items(), decided, strict=True):
            case, path = cases[index], paths[index]
            if end >= 0:
                path.append(level.nodes[end])
                if not case.is_last(case.tokens[path[-1]], case.num_output + len(path) - 1):
                    live.append(index)
                    continue
            verdicts[index] = _verdict(case, path, token)
    return [verdicts[index] for index in range(len(cases))]


def _reachable_level(
    case: Case, path: Sequence[int], target_probs: Float64Array, sampler: Sampler
) -> ReachableDraft:
    """The children of the path's last node. Writes the target's distribution at that node."""
    end = path[-1] if path else -1
    state = case.sampling.branch([case.tokens[node] for node in path])
    sampler.probabilities(state, case.logits[end + 1], case.num_output + len(path), out=target_probs)
    children = [node for node, parent in enumerate(case.parents) if parent == end]
    return ReachableDraft(case, children, [-1] * len(children), [False] * len(children))


def _verify_whole(rule: int, cases: Sequence[Case], sampler: Sampler) -> list[Verdict]:
    """One verdict for each case by a rule that decides on whole paths."""
    target_probs = sampler.lines(sum(len(case.logits) for case in cases))
    verdicts: dict[int, Verdict] = {}
    drafts: dict[int, ReachableDraft] = {}
    filled = 0
    for index, case in enumerate(cases):
        try:
            drafts[index] = reachable_draft(case, target_probs[filled:], sampler)
            filled += 1 + len(drafts[index].nodes)
        except BackendError as error:
            verdicts[index] = Verdict((), (), error=error)
    decided = _decide(list(drafts.values()), target_probs[:filled], rule)
    for (index, draft), (end, token) in zip(drafts.items(), decided, strict=True):
        if end in draft.errors:
            verdicts[index] = Verdict((), (), error=draft.errors[end])
        else:
            verdicts[index] = _verdict(cases[index], draft.path(end), token)
    return [verdicts[index] for index in range(len(cases))]


def reachable_draft(case: Case, target_probs: Float64Array, sampler: Sampler) -> ReachableDraft:
    """The reachable part of a draft. Writes the target's distributions of the root and the open nodes.

    Nothing follows a token that ends the request, a token of probability 0, or unusable logits: nodes
    below are dropped. That depends only on the path down to the token, where the target's own text would
    end too, so it adds no bias. Unusable logits are an error only if the accepted path ends there.
    """
    reachable = ReachableDraft(case)
    sampler.probabilities(case.sampling, case.logits[0], case.num_output, out=target_probs[0])
    followed = {-1: (-1, case.sampling, case.num_output)}  # open node: (index, state, tokens of output)
    for node, (token, parent) in enumerate(zip(case.tokens, case.parents, strict=True)):
        if parent not in followed:
            continue
        above, state, num_output = followed[parent]
        index = len(reachable.nodes)
        is_open = target_probs[above + 1][token] > 0 and not case.is_last(token, num_output)
        if is_open:
            try:
                state = state.branch((token,))
                line = target_probs[index + 1]
                sampler.probabilities(state, case.logits[node + 1], num_output + 1, out=line)
                followed[node] = (index, state, num_output + 1)
            except BackendError as error:
                reachable.errors[index] = error
                is_open = False
        reachable.nodes.append(node)
        reachable.parents.append(above)
        reachable.is_open.append(bool(is_open))
    return reachable


def _decide(
    group: Sequence[ReachableDraft], target_probs: Float64Array, rule: int
) -> Iterator[tuple[int, int]]:
    """For each draft, the index of the accepted path's last node and the token that follows it."""
    nodes = [(reachable.case, node) for reachable in group for node in reachable.nodes]
    coins = _uniforms(nodes, STREAM_ACCEPT)
    finals = _uniforms([(reachable.case, 0) for reachable in group], STREAM_RESIDUAL)
    draft_probs = next(
        (reachable.case.draws.draft_probs for reachable in group if reachable.case.draws is not None),
        np.empty((0, target_probs.shape[1])),
    )
    rows = [-1 if case.draws is None else int(case.draws.rows[node]) for case, node in nodes]
    ends, last = decide(
        rule,
        target_probs,
        np.array([case.tokens[node] for case, node in nodes], dtype=np.int64),
        np.array([parent for reachable in group for parent in reachable.parents], dtype=np.int64),
        np.array([is_open for reachable in group for is_open in reachable.is_open], dtype=np.bool_),
        np.cumsum([0, *(len(reachable.nodes) for reachable in group)], dtype=np.int64),
        draft_probs,
        np.array(rows, dtype=np.int64),
        coins,
        finals,
    )
    return zip(ends.tolist(), last.tolist(), strict=True)


def _uniforms(keys: Sequence[tuple[Case, int]], stream: int) -> Float64Array:
    """One uniform for each (case, node), keyed as `draws.py` describes: float64 [keys]."""
    return uniforms(
        np.array([case.sampling.seed for case, _ in keys], dtype=np.uint64),
        np.array([case.position for case, _ in keys], dtype=np.uint64),
        np.array([lane(stream, node) for _, node in keys], dtype=np.uint64),
    )


def _verdict(case: Case, accepted: Sequence[int], token: int) -> Verdict:
    """The verdict when these nodes are accepted and `token` follows (-1: none, the text has ended)."""
    tokens = [case.tokens[node] for node in accepted]
    if token >= 0:
        tokens.append(token)
    logprobs = []
    try:
        if case.num_logprobs is not None:
            for node, chosen in zip([-1, *accepted], tokens, strict=False):  # an ending has no bonus
                logprobs.append(token_logprobs(case.logits[node + 1], chosen, case.num_logprobs))
        for chosen in tokens:
            case.sampling.advance(chosen)
    except BackendError as error:
        return Verdict((), (), error=error)
    return Verdict(tuple(accepted), tuple(tokens), tuple(logprobs))
