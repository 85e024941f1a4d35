"""The classic rules: the output has the target's distribution, though not the bytes of plain decoding.

They differ in how they decide (`rule_kernels.py`). What comes before and after is the same for all: the
target's distribution at every node that can be reached, fresh noise for every decision, and the
tokens of the path that was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.errors import BackendError
from paceline.verify.kernels import uniforms
from paceline.verify.logprobs import token_logprobs
from paceline.verify.noise import STREAM_ACCEPT, STREAM_RESIDUAL, lane
from paceline.verify.pathwise import verify_pathwise
from paceline.verify.rule_kernels import decide_by_block, decide_by_rejection, decide_by_traversal
from paceline.verify.sampling import Workspace
from paceline.verify.verdict import Case, Verdict

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Decide = Callable[..., tuple[Int64Array, Int64Array]]  # see rule_kernels.py

_BUFFER_BYTES = 64 * 1024**2  # of distributions decided on in one call, unless one case needs more


def verify_rejection(cases: Sequence[Case], workspace: Workspace) -> list[Verdict]:
    """The verdicts of (multi-candidate) rejection sampling."""
    return _verify(decide_by_rejection, cases, workspace)


def verify_block(cases: Sequence[Case], workspace: Workspace) -> list[Verdict]:
    """The verdicts of block verification. ValueError if a draft is not a chain."""
    for case in cases:
        if list(case.parents) != list(range(-1, len(case.parents) - 1)):
            raise ValueError(
                f"block verification takes chains only, got a tree: parents {list(case.parents)}"
            )
    return _verify(decide_by_block, cases, workspace)


def verify_traversal(cases: Sequence[Case], workspace: Workspace) -> list[Verdict]:
    """The verdicts of traversal verification."""
    return _verify(decide_by_traversal, cases, workspace)


def _verify(decide: Decide, cases: Sequence[Case], workspace: Workspace) -> list[Verdict]:
    """One verdict for each case. Where there is nothing to toss a coin for, the pathwise one."""
    verdicts: dict[int, Verdict] = {}
    drafted = [index for index, case in enumerate(cases) if len(case.tokens) and not case.sampler.greedy]
    plain = [index for index in range(len(cases)) if index not in set(drafted)]
    verdicts.update(zip(plain, verify_pathwise([cases[index] for index in plain], workspace), strict=True))
    for group in _groups(drafted, cases):
        decided = _decide([cases[index] for index in group], decide, workspace)
        verdicts.update(zip(group, decided, strict=True))
    return [verdicts[index] for index in range(len(cases))]


def _groups(indices: Sequence[int], cases: Sequence[Case]) -> Iterator[list[int]]:
    """The cases, as many together as draw from one array of draft_probs and fit the buffer."""
    group: list[int] = []
    shared: Float64Array | None = None
    lines = 0
    for index in indices:
        case = cases[index]
        own = None if case.draws is None else case.draws.draft_probs
        lines += len(case.logits)
        apart = own is not None and shared is not None and own is not shared
        if group and (apart or lines * case.logits.shape[1] * 8 > _BUFFER_BYTES):
            yield group
            group, shared, lines = [], None, len(case.logits)
        group.append(index)
        shared = own if shared is None else shared
    if group:
        yield group


@dataclass
class Opened:
    """The part of a case's draft that can be reached. Lists are parallel."""

    case: Case
    nodes: list[int] = field(default_factory=list)  # of the draft, in order
    parents: list[int] = field(default_factory=list)  # places in `nodes`, -1 for the root's children
    is_open: list[bool] = field(default_factory=list)  # whether a token may follow
    errors: dict[int, BackendError] = field(default_factory=dict)  # places whose logits are unusable


def _decide(cases: Sequence[Case], decide: Decide, workspace: Workspace) -> list[Verdict]:
    """One verdict for each case, all decided in one call."""
    target_probs = workspace.lines(sum(len(case.logits) for case in cases))
    verdicts: list[Verdict | None] = []
    group: list[Opened] = []
    filled = 0
    for case in cases:
        try:
            opened = open_draft(case, target_probs[filled:], workspace)
        except BackendError as error:
            verdicts.append(Verdict((), (), error=error))
            continue
        verdicts.append(None)
        group.append(opened)
        filled += 1 + len(opened.nodes)
    decided = iter(_toss(group, target_probs[:filled], decide))
    return [next(decided) if verdict is None else verdict for verdict in verdicts]


def open_draft(case: Case, target_probs: Float64Array, workspace: Workspace) -> Opened:
    """What of the draft can be reached; writes the target's distributions of the root and the open nodes.

    Nothing follows a token that ends the request, a token of probability 0, or unusable logits: nodes
    below are cut away. That depends on the path down to the token alone, as the target's own text
    would end there too, so it does not bias. Unusable logits are an error only if the path ends there.
    """
    opened = Opened(case)
    case.sampler.probabilities(case.logits[0], case.num_output, workspace, out=target_probs[0])
    followed = {-1: (-1, case.sampler, case.num_output)}  # of open nodes: place, sampler, tokens of output
    for node, (token, parent) in enumerate(zip(case.tokens, case.parents, strict=True)):
        if parent not in followed:
            continue
        above, sampler, num_output = followed[parent]
        place = len(opened.nodes)
        is_open = target_probs[above + 1][token] > 0 and not case.is_last(token, num_output)
        if is_open:
            sampler = sampler.branch((token,))
            try:
                line = target_probs[place + 1]
                sampler.probabilities(case.logits[node + 1], num_output + 1, workspace, out=line)
                followed[node] = (place, sampler, num_output + 1)
            except BackendError as error:
                opened.errors[place] = error
                is_open = False
        opened.nodes.append(node)
        opened.parents.append(above)
        opened.is_open.append(bool(is_open))
    return opened


def _toss(group: Sequence[Opened], target_probs: Float64Array, decide: Decide) -> list[Verdict]:
    """The verdicts on opened cases that draw from one array of draft_probs."""
    nodes = [(opened.case, node) for opened in group for node in opened.nodes]
    coins = _uniforms(nodes, STREAM_ACCEPT)
    finals = _uniforms([(opened.case, 0) for opened in group], STREAM_RESIDUAL)
    draft_probs = next(
        (opened.case.draws.draft_probs for opened in group if opened.case.draws is not None),
        np.empty((0, target_probs.shape[1])),
    )
    rows = [-1 if case.draws is None else int(case.draws.rows[node]) for case, node in nodes]
    for (case, node), row in zip(nodes, rows, strict=True):
        if row >= 0 and not draft_probs[row, case.tokens[node]] > 0:
            raise ValueError(
                f"node {node} holds token {case.tokens[node]}, which its drafter cannot have drawn"
            )
    ends, last = decide(
        target_probs,
        np.array([case.tokens[node] for case, node in nodes], dtype=np.int64),
        np.array([parent for opened in group for parent in opened.parents], dtype=np.int64),
        np.array([is_open for opened in group for is_open in opened.is_open], dtype=np.bool_),
        np.cumsum([0, *(len(opened.nodes) for opened in group)], dtype=np.int64),
        draft_probs,
        np.array(rows, dtype=np.int64),
        coins,
        finals,
    )
    return [
        _verdict(opened, int(end), int(token)) for opened, end, token in zip(group, ends, last, strict=True)
    ]


def _uniforms(keys: Sequence[tuple[Case, int]], stream: int) -> Float64Array:
    """One uniform for each (case, node), keyed as `draws.py` tells: float64 [keys]."""
    return uniforms(
        np.array([case.sampler.seed for case, _ in keys], dtype=np.uint64),
        np.array([case.position for case, _ in keys], dtype=np.uint64),
        np.array([lane(stream, node) for _, node in keys], dtype=np.uint64),
    )


def _verdict(opened: Opened, end: int, token: int) -> Verdict:
    """The verdict when the accepted path ends at the place `end` and `token` (-1: none) follows."""
    case = opened.case
    if end in opened.errors:
        return Verdict((), (), error=opened.errors[end])
    accepted: list[int] = []
    while end >= 0:
        accepted.insert(0, opened.nodes[end])
        end = opened.parents[end]
    tokens = [case.tokens[node] for node in accepted]
    if token >= 0:
        tokens.append(token)
    logprobs = []
    if case.num_logprobs is not None:
        try:
            for node, chosen in zip([-1, *accepted], tokens, strict=False):  # an ending has no bonus
                logprobs.append(token_logprobs(case.logits[node + 1], chosen, case.num_logprobs))
        except BackendError as error:
            return Verdict((), (), error=error)
    for chosen in tokens:
        case.sampler.advance(chosen)
    return Verdict(tuple(accepted), tuple(tokens), tuple(logprobs))
