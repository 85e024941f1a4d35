"""BatchBuilder: makes the ForwardBatch of a pass, in arrays that are allocated once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.compiling import compiled
from paceline.core.arrays import Int32Array
from paceline.core.forward import Choices, ForwardBatch, KeptFeatures, KVPool, RequestStates
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.trees import DraftTrees
from paceline.kv.cache import KVCache


class BatchBuilder:
    """Turns scheduled parts and their draft trees into rows.

    A part's rows are its known tokens as a chain, then its draft nodes, whose root is the last token of the
    chain. The last row and every node need logits, or the sampled token if the backend can sample for this
    request. Prompt rows need logits if their log-probabilities were asked for.
    """

    def __init__(self, max_rows: int, max_sequences: int, choosing: bool = False) -> None:
        """`choosing`: the backend samples the tokens of requests that sample plainly."""
        self._choosing = choosing
        self._tokens = np.empty(max_rows, dtype=np.int32)
        self._positions = np.empty(max_rows, dtype=np.int32)
        self._parents = np.empty(max_rows, dtype=np.int32)
        self._logit_rows = np.empty(max_rows, dtype=np.int32)
        self._choice_rows = np.empty(max_rows, dtype=np.int32)
        self._seeds = np.empty(max_rows, dtype=np.uint64)
        self._temperatures = np.empty(max_rows, dtype=np.float64)
        self._row_offsets = np.zeros(max_sequences + 1, dtype=np.int32)
        self._context_lengths = np.empty(max_sequences, dtype=np.int32)
        self._steps = np.arange(-1, max_rows, dtype=np.int32)  # -1, 0, 1, ...: a chain's parents
        nothing = self._tokens[:0]
        self._add_tree((nothing, nothing), 0, 0)  # compile now

    def build(
        self,
        parts: Sequence[Scheduled],
        trees: DraftTrees | None,
        kv: KVCache,
        pool: KVPool,
        feature_layers: tuple[int, ...] = (),
        kept_features: tuple[KeptFeatures, ...] = (),
    ) -> ForwardBatch:
        """The batch of one pass; its arrays are valid until the next call. No trees: nothing is drafted."""
        row = outputs = choices = pages = 0
        for index, part in enumerate(parts):
            request, count = part.request, part.num_tokens
            context = part.start
            end = row + count
            if count == 1:
                self._tokens[row] = request.token_ids[context]
                self._positions[row] = context
                self._parents[row] = -1
            else:
                self._tokens[row:end] = request.token_ids[context : context + count]
                self._positions[row:end] = self._steps[1 : count + 1] + context
                self._parents[row:end] = self._steps[:count]
            skipped, wanted = prompt_rows(part)
            for local in range(skipped, skipped + wanted):
                self._logit_rows[outputs] = row + local
                outputs += 1
            last = end - 1
            if trees is not None:
                end = self._add_tree(trees.tree(index), row, end)
            if part.reaches_end and self._choosing and not request.sampling_needs:
                choices = self._choose(request, last, end, choices)
            elif part.reaches_end:
                self._logit_rows[outputs : outputs + end - last] = self._steps[last + 1 : end + 1]
                outputs += end - last
            self._context_lengths[index] = context
            self._row_offsets[index + 1] = end
            pages = max(pages, kv.num_pages(request.slot))
            row = end
        count = len(parts)
        return ForwardBatch(
            tokens=self._tokens[:row],
            positions=self._positions[:row],
            parents=self._parents[:row],
            row_offsets=self._row_offsets[: count + 1],
            context_lengths=self._context_lengths[:count],
            page_tables=_page_tables(parts, kv, pages),
            logit_rows=self._logit_rows[:outputs],
            pool=pool,
            feature_layers=feature_layers,
            choices=self._choices(choices),
            kept_features=kept_features,
            states=_states(parts, kv),
            adapters=_adapters(parts),
        )

    def _choose(self, request: Request, first: int, end: int, choices: int) -> int:
        """The new number of choices: the backend samples the token after each of these rows of a request."""
        stop = choices + end - first
        self._choice_rows[choices:stop] = self._steps[first + 1 : end + 1]
        self._seeds[choices:stop] = request.seed
        self._temperatures[choices:stop] = request.params.temperature
        return stop

    def _choices(self, count: int) -> Choices | None:
        if count == 0:
            return None
        return Choices(self._choice_rows[:count], self._seeds[:count], self._temperatures[:count])

    def _add_tree(self, tree: tuple[Int32Array, Int32Array], start: int, end: int) -> int:
        """The new end after adding a tree's rows below row end - 1 of a part that started at row `start`."""
        tokens, parents = tree
        _write_tree(tokens, parents, start, end, self._tokens, self._positions, self._parents)
        return end + len(tokens)


@compiled
def _write_tree(
    tokens: Int32Array,
    parents: Int32Array,
    start: int,
    end: int,
    to_tokens: Int32Array,
    to_positions: Int32Array,
    to_parents: Int32Array,
) -> None:
    """Write a tree's rows below row end - 1 of a part that started at row `start`."""
    for node in range(len(tokens)):
        parent = parents[node] + end - start  # the root is the part's row before `end`
        to_tokens[end + node] = tokens[node]
        to_parents[end + node] = parent
        to_positions[end + node] = to_positions[start + parent] + 1


def prompt_rows(part: Scheduled) -> tuple[int, int]:
    """The rows of a part that give requested prompt log-probabilities: the first row, and how many.

    The row of prompt token i gives that of token i + 1; token 0 has none.
    """
    request = part.request
    if not request.wants_prompt_logprobs:
        return 0, 0
    first = max(len(request.prompt_logprobs) - 1, 0) - part.start
    end = min(part.num_tokens, len(request.prompt_token_ids) - 1 - part.start)
    return max(first, 0), max(end - max(first, 0), 0)


def _adapters(parts: Sequence[Scheduled]) -> tuple[str, ...]:
    """The adapter of each part's request, if there is any."""
    names = tuple(part.request.adapter for part in parts)
    return names if any(names) else ()


def _states(parts: Sequence[Scheduled], kv: KVCache) -> RequestStates | None:
    """Where the parts' states are, if the model has recurrent layers."""
    if kv.states is None:
        return None
    slots = np.array([part.request.slot for part in parts], dtype=np.int32)
    return RequestStates(kv.states.pool, slots)


def _page_tables(parts: Sequence[Scheduled], kv: KVCache, pages: int) -> Int32Array:
    """The page tables of the parts' slots: int32 [parts, pages]."""
    if len(parts) == 1:
        slot = parts[0].request.slot
        return kv.page_tables[slot : slot + 1, :pages]
    return np.ascontiguousarray(kv.page_tables[[part.request.slot for part in parts], :pages])
