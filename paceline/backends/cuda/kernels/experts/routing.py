"""Expert routing: the top-k experts of each row, and the rows of each expert. grouped.py runs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.experts.router import FEW_ROWS
from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.products.matmul import load_squares, norm_factor
from paceline.backends.cuda.kernels.products.matrix import MIN_TOKENS, Matrix, Normed, row_tile
from paceline.backends.cuda.weights.shard import TILE
from paceline.models.config import MoeConfig

LOWEST = tl.constexpr(-3.0e38)  # below all scores but those of padding and of experts already chosen
CHOSEN = tl.constexpr(-(1 << 31))  # below the integers of all scores


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer: routed experts, then shared experts, which all rows use."""

    router: Matrix  # scores of the routed experts, then the gate of the shared ones, if there is one
    gate_up: Matrix  # a `tile_pair` of all experts, stacked
    down: Matrix  # of all experts, stacked
    moe: MoeConfig  # the rule of routing
    activation: str = "silu"
    correction: torch.Tensor | None = None  # float32 [experts] score-correction bias, for the choice only
    shared: int = 0  # number of shared experts
    factors: torch.Tensor | None = None  # float32 [experts] scales of routing weights

    @property
    def experts(self) -> int:
        """The number of experts, shared ones included."""
        return self.moe.num_experts + self.shared

    @property
    def chosen(self) -> int:
        """The number of experts of a row: its top-k and the shared ones."""
        return self.moe.experts_per_token + self.shared

    @property
    def is_gated(self) -> bool:
        """Whether the shared experts are weighted by the sigmoid of a gate; otherwise their weight is 1."""
        return self.router.width > self.moe.num_experts


@dataclass(frozen=True)
class Routing:
    """The buffers of a mixture, shared by all layers, because they run one after the other."""

    scores: torch.Tensor  # float32 [rows, padded experts] before the norm's factor and the bias
    parts: torch.Tensor  # float32 [FEW_ROWS, tiles of the residual stream, padded experts]
    shares: torch.Tensor  # float32 [rows, chosen] routing weights
    factors: torch.Tensor  # float32 [rows] norm factors
    arrivals: torch.Tensor  # int32 [tiles of the router] programs that stored a part; zero between kernels
    counts: torch.Tensor  # int32 [experts + 1] pairs of each, then finished programs; zero between kernels
    lists: torch.Tensor  # int32 [experts, rows] pairs of each expert
    blocks: torch.Tensor  # int32 [3, blocks] expert, first index in its list, count; count 0 after the last.
    # A pass of one row needs no lists: its blocks are its pairs, in order
    activated: torch.Tensor  # [rows * chosen, padded intermediate]
    outputs: torch.Tensor  # float32 [rows * chosen, padded hidden]


def routing_for(mixture: Mixture, rows: int, dtype: torch.dtype, device: torch.device) -> Routing:
    """Buffers for passes of at most `rows` rows."""
    experts, pairs = mixture.experts, rows * mixture.chosen

    def zeros(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    return Routing(
        scores=zeros(rows, mixture.router.padded_width),
        parts=zeros(min(rows, FEW_ROWS), mixture.router.depth // TILE, mixture.router.padded_width),
        shares=zeros(rows, mixture.chosen),
        factors=zeros(rows),
        arrivals=zeros(mixture.router.tiles, kind=torch.int32),
        counts=zeros(experts + 1, kind=torch.int32),
        lists=zeros(experts, rows, kind=torch.int32),
        blocks=zeros(3, blocks_for(mixture, rows, MIN_TOKENS), kind=torch.int32),
        activated=zeros(pairs, mixture.down.depth, kind=dtype),
        outputs=zeros(pairs, mixture.down.padded_width // experts),
    )


def block_rows(mixture: Mixture, rows: int) -> int:
    """Rows of a block: twice the average number of rows per expert, so that most experts need one block."""
    likely = 2 * rows * mixture.chosen // mixture.experts
    return min(row_tile(matrix, likely) for matrix in (mixture.gate_up, mixture.down))


def blocks_for(mixture: Mixture, rows: int, tokens: int) -> int:
    """The most blocks that `rows` rows can need: each expert's last block may have a single row."""
    pairs = rows * mixture.chosen
    used = min(pairs, mixture.experts)
    return used + (pairs - used) // tokens


@triton.jit
def _ordered(numbers):  # type: ignore[no-untyped-def]
    """Integers in the order of float32 numbers: warps have an instruction for the maximum of integers.

    NaN and numbers below LOWEST become LOWEST, so that no expert is chosen twice.
    """
    bits = (tl.where(numbers > LOWEST, numbers, LOWEST) + 0.0).to(tl.int32, bitcast=True)  # -0 equals 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    preferences,
    scores,
    experts,
    by_score: tl.constexpr,  # preferences are the scores
    top_k: tl.constexpr,
    most_chosen: tl.constexpr,
    most_experts: tl.constexpr,
):
    """The top-k experts by preference, ties to the lower index: int32 [most_chosen]; and their scores."""
    expert, rank = tl.arange(0, most_experts), tl.arange(0, most_chosen)
    left, known = tl.where(expert < experts, _ordered(preferences), CHOSEN), _ordered(scores)
    best, best_scores = tl.zeros([most_chosen], tl.int32), tl.zeros([most_chosen], tl.int32)
    for turn in tl.static_range(top_k):
        score = tl.max(left, 0)
        index = tl.min(tl.where(left == score, expert, most_experts), 0)
        if not by_score:
            score = tl.max(tl.where(expert == index, known, CHOSEN), 0)
        best = tl.where(rank == turn, index, best)
        best_scores = tl.where(rank == turn, score, best_scores)
        left = tl.where(expert == index, CHOSEN, left)
    bits = tl.where(best_scores < 0, best_scores ^ 0x7FFFFFFF, best_scores)
    return best, bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _of_best_groups(  # type: ignore[no-untyped-def]
    preferences,
    experts,
    groups: tl.constexpr,
    chosen_groups: tl.constexpr,
    group_experts: tl.constexpr,
    most_groups: tl.constexpr,
):
    """Preferences, -inf outside the best groups. A group's score is the sum of its best experts' scores."""
    expert, number = tl.arange(0, preferences.shape[0]), tl.arange(0, most_groups)
    group = expert // (experts // groups)
    sums = tl.full([most_groups], float("-inf"), tl.float32)
    for index in tl.static_range(groups):
        left = tl.where((group == index) & (expert < experts), preferences, float("-inf"))
        total = 0.0
        for _ in tl.static_range(group_experts):
            best = tl.argmax(left, 0)
            total += tl.max(left, 0)
            left = tl.where(expert == best, float("-inf"), left)
        sums = tl.where(number == index, total, sums)
    is_chosen = tl.zeros(preferences.shape, tl.int32)
    for _ in tl.static_range(chosen_groups):
        best = tl.argmax(sums, 0)
        is_chosen = tl.where(group == best, 1, is_chosen)
        sums = tl.where(number == best, float("-inf"), sums)
    return tl.where(is_chosen > 0, preferences, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _cut(  # type: ignore[no-untyped-def]
    counts_at,
    blocks_at,
    experts,
    line,
    tokens: tl.constexpr,
    most_experts: tl.constexpr,
    most_blocks: tl.constexpr,
):
    """Split all lists into blocks, and reset the counters."""
    expert, block = tl.arange(0, most_experts), tl.arange(0, most_blocks)
    count = tl.load(counts_at + expert, mask=expert < experts, other=0, cache_modifier=".cg")
    each = (count + tokens - 1) // tokens
    ends = tl.cumsum(each, 0)
    for turn in range(tl.max(each, 0)):
        block_at, is_used = blocks_at + ends - each + turn, turn < each
        tl.store(block_at, expert, mask=is_used)
        tl.store(block_at + line, tl.zeros_like(expert) + turn * tokens, mask=is_used)
        tl.store(block_at + 2 * line, tl.minimum(count - turn * tokens, tokens), mask=is_used)
    is_free = (block >= tl.sum(each, 0)) & (block < line)
    tl.store(blocks_at + 2 * line + block, tl.zeros_like(block), mask=is_free)
    tl.store(counts_at + expert, tl.zeros_like(expert), mask=expert < experts)
    tl.store(counts_at + experts, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(at, column, columns, bias_at, factor, parts: tl.constexpr, line, has_bias: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's scores of these experts: the sum of `parts` in order, times the norm's factor, plus bias."""
    inside = column < columns
    total = tl.load(at + column, mask=inside, other=0.0)
    for part in tl.static_range(1, parts):
        total += tl.load(at + part * line + column, mask=inside, other=0.0)
    total *= factor
    if has_bias:
        total += tl.load(bias_at + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, total, float("-inf"))


@triton.jit
def _sum(values):  # type: ignore[no-untyped-def]
    """The sum of values: [1]. In pairs, which fixes the order: see norm_factor."""
    count: tl.constexpr = values.shape[0]
    for power in tl.static_range(12):
        if (count >> power) > 1:
            values = tl.sum(tl.reshape(values, ((count >> power) // 2, 2)), 1)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(  # type: ignore[no-untyped-def]
    scores,
    correction_at,
    experts,
    normalize: tl.constexpr,
    is_sigmoid: tl.constexpr,
    has_correction: tl.constexpr,
    expert_groups: tl.constexpr,
    chosen_groups: tl.constexpr,
    group_experts: tl.constexpr,
    top_k: tl.constexpr,
    most_chosen: tl.constexpr,
    most_experts: tl.constexpr,
    most_groups: tl.constexpr,
):
    """The top-k experts of a row's scores, int32 [most_chosen], and their weights, float32 [most_chosen].

    `scores` are float32 [most_experts], -inf beyond the last expert.
    """
    expert, rank = tl.arange(0, most_experts), tl.arange(0, most_chosen)
    top, preferences = tl.max(scores, 0), scores  # not sigmoids: large scores have equal ones
    by_score: tl.constexpr = not (has_correction or expert_groups > 1)
    if not by_score:
        if is_sigmoid:
            preferences = 1.0 / (1.0 + tl.exp(-scores))
        else:
            preferences = tl.exp(scores - top)
            preferences /= _sum(preferences)
        if has_correction:
            preferences += tl.load(correction_at + expert, mask=expert < experts, other=0.0)
        if expert_groups > 1:
            preferences = _of_best_groups(
                preferences, experts, expert_groups, chosen_groups, group_experts, most_groups
            )
    best, weights = _choose(preferences, scores, experts, by_score, top_k, most_chosen, most_experts)
    weights = 1.0 / (1.0 + tl.exp(-weights)) if is_sigmoid else tl.exp(weights - top)
    weights = tl.where(rank < top_k, weights, 0.0)
    if normalize:
        weights /= _sum(weights)
    elif not is_sigmoid:
        weights /= _sum(tl.exp(scores - top))
    return best, weights


@triton.jit  # type: ignore[untyped-decorator]
def _join_lists(  # type: ignore[no-untyped-def]
    best,
    is_real,
    counts_at,
    lists_at,
    blocks_at,
    list_line,
    block_line,
    counted,  # all experts
    chosen: tl.constexpr,
    tokens: tl.constexpr,
    most_counts: tl.constexpr,
    most_blocks: tl.constexpr,
) -> None:
    """Append a row's pairs to its experts' lists; the last program to finish splits lists into blocks."""
    row, rank = tl.program_id(0), tl.arange(0, best.shape[0])
    is_chosen = rank < tl.where(is_real, chosen, 0)
    slot = tl.atomic_add(counts_at + best, tl.full(best.shape, 1, tl.int32), mask=is_chosen)
    tl.store(lists_at + best * list_line + slot, row * chosen + rank, mask=is_chosen)
    tl.debug_barrier()
    if tl.atomic_add(counts_at + counted, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        _cut(counts_at, blocks_at, counted, block_line, tokens, most_counts, most_blocks)


@triton.jit  # type: ignore[untyped-decorator]
def _route_kernel(  # type: ignore[no-untyped-def]
    scores_at,
    squares_at,
    slot_mapping_at,
    shares_at,
    factors_at,
    counts_at,
    lists_at,
    blocks_at,
    correction_at,
    expert_factors_at,
    bias_at,
    score_line,
    list_line,
    block_line,
    experts,
    groups,
    size,
    eps,
    normalize: tl.constexpr,
    is_sigmoid: tl.constexpr,
    has_correction: tl.constexpr,
    expert_groups: tl.constexpr,
    chosen_groups: tl.constexpr,
    group_experts: tl.constexpr,
    weight_scale: tl.constexpr,
    has_factors: tl.constexpr,
    has_bias: tl.constexpr,
    parts: tl.constexpr,
    top_k: tl.constexpr,
    shared: tl.constexpr,
    is_gated: tl.constexpr,
    is_alone: tl.constexpr,
    tokens: tl.constexpr,
    most_chosen: tl.constexpr,
    most_experts: tl.constexpr,
    most_groups: tl.constexpr,
    most_counts: tl.constexpr,
    most_blocks: tl.constexpr,
    max_groups: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_sync(pdl)
    row = tl.program_id(0)
    chosen: tl.constexpr = top_k + shared
    one, rank = row + tl.arange(0, 1), tl.arange(0, most_chosen)
    is_real = tl.load(slot_mapping_at + row) >= 0  # padding rows have no experts
    factor = norm_factor(load_squares(squares_at, one, groups, max_groups), size, eps)
    tl.store(factors_at + one[None, :], factor)
    factor = tl.reshape(factor, (1,))
    scores_at += row * parts * score_line
    expert = tl.arange(0, most_experts)
    scores = _scores(scores_at, expert, experts, bias_at, factor, parts, score_line, has_bias)
    best, shares = _weigh(
        scores,
        correction_at,
        experts,
        normalize,
        is_sigmoid,
        has_correction,
        expert_groups,
        chosen_groups,
        group_experts,
        top_k,
        most_chosen,
        most_experts,
        most_groups,
    )
    if weight_scale != 1:
        shares *= weight_scale
    if has_factors:
        shares *= tl.load(expert_factors_at + best, mask=rank < top_k, other=0.0)
    if shared > 0:
        weight = tl.full([most_chosen], 1.0, tl.float32)
        if is_gated:
            score = _scores(
                scores_at, experts + rank * 0, experts + 1, None, factor, parts, score_line, False
            )
            weight = 1.0 / (1.0 + tl.exp(-score))
        shares = tl.where(rank < top_k, shares, weight)
        best = tl.where(rank < top_k, best, experts + rank - top_k)
    tl.store(shares_at + row * chosen + rank, shares, mask=rank < chosen)
    if is_alone:
        tl.store(blocks_at + rank, best, mask=rank < chosen)
        tl.store(blocks_at + 2 * block_line + rank, tl.where(is_real, 1, 0) + rank * 0, mask=rank < chosen)
    else:
        _join_lists(
            best,
            is_real,
            counts_at,
            lists_at,
            blocks_at,
            list_line,
            block_line,
            experts + shared,
            chosen,
            tokens,
            most_counts,
            most_blocks,
        )


def route(
    mixture: Mixture,
    read: Normed,
    slot_mapping: torch.Tensor,
    routing: Routing,
    tokens: int,
    has_parts: bool,
) -> None:
    """Choose every row's experts by their scores, and split the experts' rows into blocks of `tokens`."""
    pdl, moe, bias = supports_pdl(read.rows.device), mixture.moe, mixture.router.bias
    groups = read.squares.shape[1]
    _route_kernel[(len(slot_mapping),)](
        routing.parts if has_parts else routing.scores,
        read.squares,
        slot_mapping,
        routing.shares,
        routing.factors,
        routing.counts,
        routing.lists,
        routing.blocks,
        mixture.correction,
        mixture.factors,
        bias,
        routing.scores.shape[1],
        routing.lists.shape[1],
        routing.blocks.shape[1],
        moe.num_experts,
        groups,
        read.size,
        read.eps,
        moe.normalize_weights,
        moe.scoring == "sigmoid",
        mixture.correction is not None,
        moe.groups,
        moe.chosen_groups,
        moe.group_experts,
        moe.weight_scale,
        mixture.factors is not None,
        bias is not None,
        routing.parts.shape[1] if has_parts else 1,
        moe.experts_per_token,
        mixture.shared,
        mixture.is_gated,
        len(slot_mapping) == 1,
        tokens,
        triton.next_power_of_2(mixture.chosen),
        triton.next_power_of_2(moe.num_experts),
        triton.next_power_of_2(moe.groups),
        triton.next_power_of_2(mixture.experts),
        triton.next_power_of_2(routing.blocks.shape[1]),
        triton.next_power_of_2(groups),
        pdl,
        num_warps=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
