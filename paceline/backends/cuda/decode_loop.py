"""Plain decoding that stays on the device: each step writes the inputs of the next one.

    device   tokens, positions, places of all rows ─> layers ─> logits ─> tokens ─┐
               ^────────────── next inputs, written by the same graph ────────────┤
    host                                                 one small copy per step <┘, read one step later

A row is a request that decodes. What a request is lies on the device too (DeviceRequests): its tokens, how
many are computed, its pages, its seed and temperature. The host reserves pages ahead and looks at tokens that
came before; it never stands between two steps. A step that speculates will read and write the same state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.graphs import Graphs
from paceline.backends.cuda.kernels.attention import MOST_PATH, RowTables
from paceline.backends.cuda.kernels.launching import follow, overlaps
from paceline.backends.cuda.kernels.sampling import best_candidate, candidates_for, race
from paceline.backends.cuda.model import Pool, make_workspace, run_head, run_layers
from paceline.backends.cuda.weights import Weights


@dataclass(frozen=True)
class DeviceRequests:
    """What the device knows about the requests in its slots."""

    tokens: torch.Tensor  # int32 [slots, longest] prompt and output
    lengths: torch.Tensor  # int32 [slots] tokens whose keys and values are in the pool
    pages: torch.Tensor  # int32 [slots, most pages]
    seeds: torch.Tensor  # int64 [slots]
    temperatures: torch.Tensor  # float64 [slots] 0: greedy


@dataclass(frozen=True)
class LoopRows:
    """The inputs of a step. Row r is the request in slot slots[r]."""

    slots: torch.Tensor  # int32 [rows]; -1: the row is padding
    tokens: torch.Tensor  # int32 [rows]
    tables: RowTables
    seeds: torch.Tensor  # int64 [rows]
    temperatures: torch.Tensor  # float64 [rows]


def make_requests(slots: int, longest: int, page_size: int, device: torch.device) -> DeviceRequests:
    """Empty slots for requests of at most `longest` tokens."""
    return DeviceRequests(
        torch.zeros((slots, longest), dtype=torch.int32, device=device),
        torch.zeros(slots, dtype=torch.int32, device=device),
        torch.zeros((slots, -(-longest // page_size)), dtype=torch.int32, device=device),
        torch.zeros(slots, dtype=torch.int64, device=device),
        torch.zeros(slots, dtype=torch.float64, device=device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _next_row(  # type: ignore[no-untyped-def]
    slot, position, row, known_at, pages_at, row_tables, longest, most_pages, page_size: tl.constexpr
) -> None:
    """Write the inputs of a row whose next token stands at `position`; a slot of -1 makes it padding."""
    tokens_at, positions_at, places_at, straight_at, counts_at, tile_pages_at = row_tables
    real = slot >= 0
    own = tl.maximum(slot, 0)
    page = tl.load(pages_at + own * most_pages + position // page_size)
    tl.store(tokens_at + row, tl.load(known_at + own * longest + position))
    tl.store(positions_at + row, tl.where(real, position, 0))
    tl.store(places_at + row, tl.where(real, page * page_size + position % page_size, -1))
    tl.store(straight_at + row, position + 1)
    tl.store(counts_at + row, real.to(tl.int32))
    tl.store(tile_pages_at + row, own * most_pages)


@triton.jit  # type: ignore[untyped-decorator]
def _begin_kernel(  # type: ignore[no-untyped-def]
    slots_at,
    known_at,
    lengths_at,
    pages_at,
    seeds_at,
    temperatures_at,
    tokens_at,
    positions_at,
    places_at,
    straight_at,
    counts_at,
    tile_pages_at,
    row_seeds_at,
    row_temperatures_at,
    longest,
    most_pages,
    page_size: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(slots_at + row)
    own = tl.maximum(slot, 0)
    tl.store(row_seeds_at + row, tl.load(seeds_at + own))
    tl.store(row_temperatures_at + row, tl.load(temperatures_at + own))
    row_tables = (tokens_at, positions_at, places_at, straight_at, counts_at, tile_pages_at)
    _next_row(
        slot, tl.load(lengths_at + own), row, known_at, pages_at, row_tables, longest, most_pages, page_size
    )


@triton.jit  # type: ignore[untyped-decorator]
def _advance_kernel(  # type: ignore[no-untyped-def]
    scores_at,
    ids_at,
    slots_at,
    known_at,
    lengths_at,
    pages_at,
    tokens_at,
    positions_at,
    places_at,
    straight_at,
    counts_at,
    tile_pages_at,
    output_at,
    blocks,
    longest,
    most_pages,
    most_blocks: tl.constexpr,
    page_size: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    follow(overlap)
    slot = tl.load(slots_at + row)
    chosen = best_candidate(scores_at, ids_at, row, blocks, most_blocks)
    tl.store(output_at + row, chosen)
    if slot >= 0:
        position = tl.load(positions_at + row) + 1
        if position < longest:
            tl.store(lengths_at + slot, position)
            tl.store(known_at + slot * longest + position, tl.maximum(chosen, 0))
            tl.debug_barrier()
            row_tables = (tokens_at, positions_at, places_at, straight_at, counts_at, tile_pages_at)
            _next_row(slot, position, row, known_at, pages_at, row_tables, longest, most_pages, page_size)


class DecodeLoop:
    """Steps of plain decoding over requests that the device knows."""

    def __init__(
        self, weights: Weights, pool: Pool, requests: DeviceRequests, max_rows: int, page_size: int
    ) -> None:
        device = weights.device
        self.weights, self.pool, self.requests, self.page_size = weights, pool, requests, page_size
        self.workspace = make_workspace(weights, max_rows, requests.tokens.shape[1])
        self._candidates = candidates_for(max_rows, weights.config.vocab_size, device)
        self._graphs = Graphs(device)

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.output = integers(max_rows)  # the tokens of the last step; -1: unusable logits
        self._numbers = integers(7, max_rows)
        self._paths = integers(1, MOST_PATH)  # never read: decodes are straight
        self._row_numbers = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._temperatures = torch.zeros(max_rows, dtype=torch.float64, device=device)

    def begin(self, slots: list[int], rows: int) -> None:
        """Let the next steps decode the requests in these slots, as `rows` rows."""
        inputs, requests = self._inputs(rows), self.requests
        padded = slots + [-1] * (rows - len(slots))
        inputs.slots.copy_(torch.tensor(padded, dtype=torch.int32))
        _begin_kernel[(rows,)](
            inputs.slots,
            requests.tokens,
            requests.lengths,
            requests.pages,
            requests.seeds,
            requests.temperatures,
            *self._row_tables(inputs),
            inputs.seeds,
            inputs.temperatures,
            requests.tokens.shape[1],
            requests.pages.shape[1],
            self.page_size,
            num_warps=1,
        )

    def step(self, rows: int) -> None:
        """One token for every row. `output` has them when the device is done."""
        self._graphs.run(rows, lambda: self._step(rows))

    def _step(self, rows: int) -> None:
        inputs, requests, candidates = self._inputs(rows), self.requests, self._candidates
        run_layers(self.weights, self.workspace, inputs.tokens, inputs.tables, self.pool, self.page_size)
        run_head(self.weights, self.workspace, self.workspace.attention_input, rows)
        vocab_size = self.weights.config.vocab_size
        positions = inputs.tables.positions
        race(
            self.workspace.logits, vocab_size, inputs.temperatures, inputs.seeds, positions, candidates, rows
        )
        blocks = candidates.ids.shape[1]
        overlap = overlaps(self.output.device)
        _advance_kernel[(rows,)](
            candidates.scores,
            candidates.ids,
            inputs.slots,
            requests.tokens,
            requests.lengths,
            requests.pages,
            *self._row_tables(inputs),
            self.output,
            blocks,
            requests.tokens.shape[1],
            requests.pages.shape[1],
            triton.next_power_of_2(blocks),
            self.page_size,
            overlap,
            num_warps=1,
            launch_pdl=overlap,
        )

    def _inputs(self, rows: int) -> LoopRows:
        lines = [line[:rows] for line in self._numbers]
        slots, tokens, positions, places, straight, counts, tile_pages = lines
        tables = RowTables(
            positions,
            places,
            straight,
            self._paths,
            self._row_numbers[:rows],
            counts,
            tile_pages,
            self.requests.pages.view(-1),
        )
        return LoopRows(slots, tokens, tables, self._seeds[:rows], self._temperatures[:rows])

    def _row_tables(self, inputs: LoopRows) -> tuple[torch.Tensor, ...]:
        """What a step writes of the next one's inputs."""
        tables = inputs.tables
        return (
            inputs.tokens,
            tables.positions,
            tables.places,
            tables.straight,
            tables.tile_counts,
            tables.tile_pages,
        )
