"""Vocabulary-parallel embedding and sampling: each rank has the rows and logits of some token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed, Tiling
from paceline.backends.cuda.kernels.rows import embed
from paceline.backends.cuda.kernels.sampling.gumbel import Candidates, candidates_for, gumbel_argmax


def embed_tokens(
    tokens: torch.Tensor, table: Matrix, hidden: torch.Tensor, norm: torch.Tensor, normed: Normed
) -> None:
    """`embed` with a table that is sharded over ranks: the rank with a token's row sends it to all."""
    if table.shard.size > 1:
        tokens, table = _gathered(tokens, table)
    embed(tokens, table, hidden, norm, normed)


def _gathered(tokens: torch.Tensor, table: Matrix) -> tuple[torch.Tensor, Matrix]:
    """A table with only the rows of these tokens, in their order, and the token's indices in it.

    Rows are selected, not summed over ranks: -0.0 + 0.0 has other bits.
    """
    ranks, columns = table.shard.ranks, table.tiling.columns
    ids = tokens.long()
    owner = ids // table.padded_width
    local = (ids - ranks.rank * table.padded_width).clamp(0, table.padded_width - 1)
    lines = table.weight[local // columns, :, local % columns].flatten(1)
    all_lines = lines.new_empty((ranks.size, *lines.shape))
    ranks.gather_into([all_lines], [lines])
    number = torch.arange(len(tokens), device=tokens.device)
    chosen = all_lines[owner, number]
    tiling = Tiling(columns=1, step=chosen.shape[1])
    return number.int(), Matrix(chosen[:, None, None], len(tokens), tiling)


@dataclass(frozen=True)
class SharedCandidates:
    """The best token of each block: of this rank's ids, and of all ranks' ids. The same on one GPU."""

    local: Candidates
    full: Candidates


def shared_candidates_for(rows: int, head: Matrix, device: torch.device) -> SharedCandidates:
    """Uninitialized candidates of `rows` rows, of the logits that this matrix gives."""
    local = candidates_for(rows, head.padded_width, device)
    if head.shard.size == 1:
        return SharedCandidates(local, local)
    blocks = local.ids.shape[1] * head.shard.size
    full = Candidates(local.scores.new_empty((rows, blocks)), local.ids.new_empty((rows, blocks)))
    return SharedCandidates(local, full)


def sample_local(
    logits: torch.Tensor,
    head: Matrix,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    candidates: SharedCandidates,
    rows: int,
) -> Candidates:
    """The candidates of all ranks, after `gumbel_argmax` of this rank's logits of `head`.

    Ranks exchange 12 bytes for each 2,048 logits.
    """
    local, full = candidates.local, candidates.full
    options = temperatures, seeds, positions
    first_id = head.shard.ranks.rank * head.padded_width
    gumbel_argmax(logits, head.width, *options, local, rows, first_id=first_id)
    head.shard.gather([local.scores, local.ids], [full.scores, full.ids], rows)
    return full
