"""Expert routing: the top-k experts of each row, and the rows of each expert. experts.py runs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.matmul import load_squares, norm_factor
from paceline.backends.cuda.kernels.matrix import MIN_TOKENS, Matrix, Normed, row_tile
from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.models.config import MoeConfig

LOWEST = tl.constexpr(-3.0e38)  # below all scores but those of padding and of experts already chosen


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer."""

    router: Matrix
    gate_up: Matrix  # a `tile_pair` of all experts, one after the other
    down: Matrix  # of all experts, one after the other
    moe: MoeConfig  # how rows choose their experts
    activation: str = "silu"
    correction: torch.Tensor | None = None  # float32 [experts] added to scores, for the choice alone

    @property
    def experts(self) -> int:
        return self.router.width

    @property
    def chosen(self) -> int:
        """Top-k: the experts of a row."""
        return self.moe.experts_per_token


@dataclass(frozen=True)
class Routing:
    """The buffers of a mixture. All layers, which run in turn, share one set."""

    scores: torch.Tensor  # float32 [rows, padded experts]
    shares: torch.Tensor  # float32 [rows, chosen] weights of a row's experts
    factors: torch.Tensor  # float32 [rows] norm factors
    counts: torch.Tensor  # int32 [experts + 1] pairs of each, then finished programs; zero between kernels
    lists: torch.Tensor  # int32 [experts, rows] pairs of each
    blocks: torch.Tensor  # int32 [3, blocks] expert, first index in its list, count; 0 after the last
    activated: torch.Tensor  # [rows * chosen, padded intermediate]
    outputs: torch.Tensor  # float32 [rows * chosen, padded hidden]


def routing_for(mixture: Mixture, rows: int, dtype: torch.dtype, device: torch.device) -> Routing:
    """Buffers for passes of at most `rows` rows."""
    experts, pairs = mixture.experts, rows * mixture.chosen

    def zeros(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    return Routing(
        scores=zeros(rows, mixture.router.padded_width),
        shares=zeros(rows, mixture.chosen),
        factors=zeros(rows),
        counts=zeros(experts + 1, kind=torch.int32),
        lists=zeros(experts, rows, kind=torch.int32),
        blocks=zeros(3, blocks_for(mixture, rows, MIN_TOKENS), kind=torch.int32),
        activated=zeros(pairs, mixture.down.depth, kind=dtype),
        outputs=zeros(pairs, mixture.down.padded_width // experts),
    )


def block_rows(mixture: Mixture, rows: int) -> int:
    """Rows of a block: twice the average of an expert, so that most experts need one block."""
    likely = 2 * rows * mixture.chosen // mixture.experts
    return min(row_tile(matrix, likely) for matrix in (mixture.gate_up, mixture.down))


def blocks_for(mixture: Mixture, rows: int, tokens: int) -> int:
    """The most blocks that `rows` rows may need: each expert's last one may have a single row."""
    pairs = rows * mixture.chosen
    used = min(pairs, mixture.experts)
    return used + (pairs - used) // tokens


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    preferences,
    scores,
    experts,
    chosen: tl.constexpr,
    most_chosen: tl.constexpr,
    most_experts: tl.constexpr,
):
    """The top-k experts by preference, ties to the lower: int32 [most_chosen]; and their scores."""
    expert, rank = tl.arange(0, most_experts), tl.arange(0, most_chosen)
    # no expert is chosen twice, even if scores are NaN
    left = tl.where(expert < experts, tl.where(preferences > LOWEST, preferences, LOWEST), float("-inf"))
    best = tl.zeros([most_chosen], tl.int32)
    best_scores = tl.zeros([most_chosen], tl.float32)
    for turn in tl.static_range(chosen):
        index = tl.argmax(left, 0)
        score = tl.sum(tl.where(expert == index, scores, 0.0), 0)
        best = tl.where(rank == turn, index, best)
        best_scores = tl.where(rank == turn, score, best_scores)
        left = tl.where(expert == index, float("-inf"), left)
    return best, best_scores


@triton.jit  # type: ignore[untyped-decorator]
def _of_best_groups(  # type: ignore[no-untyped-def]
    preferences,
    experts,
    groups: tl.constexpr,
    chosen_groups: tl.constexpr,
    group_experts: tl.constexpr,
    most_groups: tl.constexpr,
):
    """Preferences of the experts in the best groups, -inf of others. A group is its best experts' sum."""
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
    """Cut all lists into blocks, and reset the counters."""
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
    chosen: tl.constexpr,
    tokens: tl.constexpr,
    most_chosen: tl.constexpr,
    most_experts: tl.constexpr,
    most_groups: tl.constexpr,
    most_blocks: tl.constexpr,
    max_groups: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_sync(pdl)
    row = tl.program_id(0)
    one = row + tl.arange(0, 1)
    expert, rank = tl.arange(0, most_experts), tl.arange(0, most_chosen)
    factor = norm_factor(load_squares(squares_at, one, groups, max_groups), size, eps)
    tl.store(factors_at + one[None, :], factor)
    scores = tl.load(scores_at + row * score_line + expert, mask=expert < experts, other=float("-inf"))
    is_chosen, top = rank < chosen, tl.max(scores, 0)
    if is_sigmoid or has_correction or expert_groups > 1:
        preferences = scores  # large ones have the same sigmoid
        if is_sigmoid:
            scores = 1.0 / (1.0 + tl.exp(-scores))
        else:
            scores = tl.exp(scores - top)
            scores /= tl.sum(scores, 0)
        if has_correction or expert_groups > 1:
            preferences = scores
        if has_correction:
            preferences += tl.load(correction_at + expert, mask=expert < experts, other=0.0)
        if expert_groups > 1:
            preferences = _of_best_groups(
                preferences, experts, expert_groups, chosen_groups, group_experts, most_groups
            )
        best, shares = _choose(preferences, scores, experts, chosen, most_chosen, most_experts)
        total = tl.sum(tl.where(is_chosen, shares, 0.0), 0) if normalize else 1.0
    else:
        best, best_scores = _choose(scores, scores, experts, chosen, most_chosen, most_experts)
        shares = tl.where(is_chosen, tl.exp(best_scores - top), 0.0)
        total = tl.sum(shares, 0) if normalize else tl.sum(tl.exp(scores - top), 0)
    shares = shares / total
    if weight_scale != 1:
        shares *= weight_scale
    tl.store(shares_at + row * chosen + rank, shares, mask=is_chosen)
    is_chosen = rank < tl.where(
        tl.load(slot_mapping_at + row) >= 0, chosen, 0
    )  # padding rows have no experts
    slot = tl.atomic_add(counts_at + best, tl.full([most_chosen], 1, tl.int32), mask=is_chosen)
    tl.store(lists_at + best * list_line + slot, row * chosen + rank, mask=is_chosen)
    tl.debug_barrier()
    if tl.atomic_add(counts_at + experts, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        _cut(counts_at, blocks_at, experts, block_line, tokens, most_experts, most_blocks)


def route(mixture: Mixture, read: Normed, slot_mapping: torch.Tensor, routing: Routing, tokens: int) -> None:
    """Choose every row's experts by `routing.scores`, and cut the rows of experts into blocks of `tokens`."""
    pdl, moe = supports_pdl(read.rows.device), mixture.moe
    groups = read.squares.shape[1]
    _route_kernel[(len(slot_mapping),)](
        routing.scores,
        read.squares,
        slot_mapping,
        routing.shares,
        routing.factors,
        routing.counts,
        routing.lists,
        routing.blocks,
        mixture.correction,
        routing.scores.shape[1],
        routing.lists.shape[1],
        routing.blocks.shape[1],
        mixture.experts,
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
        mixture.chosen,
        tokens,
        triton.next_power_of_2(mixture.chosen),
        triton.next_power_of_2(mixture.experts),
        triton.next_power_of_2(moe.groups),
        triton.next_power_of_2(routing.blocks.shape[1]),
        triton.next_power_of_2(groups),
        pdl,
        num_warps=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
