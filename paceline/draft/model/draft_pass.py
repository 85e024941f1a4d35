"""Passes of a draft model or head: building its ForwardBatch, and catching up on accepted tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from paceline.backends.base import Backend
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import ForwardBatch
from paceline.core.request import Request
from paceline.draft.model.draft_cache import Context, DraftCache
from paceline.kv.pages import pages_for

Output = TypeVar("Output")


@dataclass(slots=True)  # not frozen: there is one for each request of every pass
class Part:
    """One request's rows of a pass. Immutable by convention."""

    context: Context
    start: int  # KV index of the first row: everything before it is computed
    tokens: Sequence[int]
    parents: Sequence[int]  # local rows, -1: the token before `start`
    outputs: Sequence[int] = ()  # local rows whose logits are wanted
    nodes: Sequence[int] = ()  # the tree node of each row; empty: the rows are tokens of the context


class Passes(ABC, Generic[Output]):
    """Runs a draft model over the requests' contexts and the trees below them."""

    first_position = 0  # position of the row at KV index 0
    max_before = 2**31  # tokens besides the last of each context in one pass; more get passes of their own

    def __init__(self, cache: DraftCache, page_size: int, max_rows: int) -> None:
        self._cache = cache
        self._page_size = page_size
        self._max_rows = max_rows

    @abstractmethod
    def run(self, parts: Sequence[Part]) -> Output:
        """The outputs of one pass, part after part; valid until the next pass."""

    def batch(self, parts: Sequence[Part], room: int = 0) -> ForwardBatch:
        """The rows of one pass, with page tables that reach `room` rows further.

        Built in lists: for a few rows they are faster than arrays.
        """
        tokens: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        outputs: list[int] = []
        offsets = [0]
        for part in parts:
            first = len(tokens)
            tokens += part.tokens
            parents += part.parents
            outputs += [first + row for row in part.outputs]
            root = part.start + self.first_position
            if part.nodes:
                for parent in part.parents:
                    positions.append(positions[first + parent] + 1 if parent >= 0 else root)
            else:  # tokens of the context: a chain
                positions += range(root, root + len(part.tokens))
            offsets.append(len(tokens))
        return ForwardBatch(
            tokens=np.array(tokens, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            parents=np.array(parents, dtype=np.int32),
            row_offsets=np.array(offsets, dtype=np.int32),
            context_lengths=np.array([part.start for part in parts], dtype=np.int32),
            page_tables=self._page_tables(parts, room),
            logit_rows=np.array(outputs, dtype=np.int32),
            pool=self._cache.pool,
        )

    def catch_up(self, contexts: Sequence[Context]) -> Output:
        """The outputs for the last token of each context, after all tokens before it are computed.

        One pass, unless there is more to compute than fits in one.
        """
        return self._compute(self._last_parts(contexts))

    def _last_parts(self, contexts: Sequence[Context]) -> list[Part]:
        """The parts of the pass that ends at the contexts' last tokens; what does not fit is run before."""
        while True:
            lasts = [len(context.tokens) - 1 for context in contexts]
            starts = [*map(min, self._cache.computed(contexts), lasts)]
            missing = sum(lasts) + len(lasts) - sum(starts)
            max_rows = min(self._max_rows, len(contexts) + self.max_before)
            if missing <= max_rows and self._are_apart(contexts, starts, lasts):
                break
            self._compute(self._chunks(contexts, starts))
        rest = zip(contexts, starts, strict=True)
        return [_chain(context, start, len(context.tokens), True) for context, start in rest]

    def _are_apart(self, contexts: Sequence[Context], starts: Sequence[int], lasts: Sequence[int]) -> bool:
        """Whether no two contexts compute the same page. Last pages are never shared: they are not full."""
        pages: list[int] = []
        for context, start, last in zip(contexts, starts, lasts, strict=True):
            first, end = start // self._page_size, last // self._page_size
            if first < end:
                pages += context.pages[first:end].tolist()
        return len(set(pages)) == len(pages)

    def compute(self, contexts: Sequence[Context]) -> None:
        """Compute all tokens of the contexts but the last of each, in passes without outputs."""
        while chunks := self._chunks(contexts, self._cache.computed(contexts)):
            self._compute(chunks)

    def attach(self, requests: Sequence[Request], longest: int) -> bool:
        """Whether these requests fit `longest` tokens; if so, all their tokens but the last are computed."""
        contexts = self._cache.open(requests, [1] * len(requests))
        opened = [context for context in contexts if context is not None]
        if len(opened) < len(requests) or max(request.most_tokens for request in requests) > longest:
            return False
        self.compute(opened)
        return True

    def detach(self, requests: Sequence[Request], unsure: int) -> None:
        """Record that a device has computed all tokens of these requests but the last `unsure`."""
        contexts = self._cache.open(requests, [1] * len(requests))
        opened = [context for context in contexts if context is not None]
        starts = zip(opened, self._cache.computed(opened), strict=True)
        spans = [(context, start, len(context.tokens) - unsure) for context, start in starts]
        self._cache.keep([span for span in spans if span[1] < span[2]])

    def _chunks(self, contexts: Sequence[Context], starts: Sequence[int]) -> list[Part]:
        """The parts of one pass over the contexts, without their last tokens.

        Contexts may share pages that are not computed yet: the first one computes them, the others skip them.
        """
        rows = self._max_rows
        page_size = self._page_size
        taken: set[int] = set()
        chunks = []
        for context, start in zip(contexts, starts, strict=True):
            end = min(len(context.tokens) - 1, start + rows)
            pages = context.pages[start // page_size : pages_for(end, page_size)].tolist()
            if start < end and taken.isdisjoint(pages):
                taken.update(pages)
                rows -= end - start
                chunks.append(_chain(context, start, end))
        return chunks

    def _compute(self, parts: Sequence[Part]) -> Output:
        """Run parts of contexts and record that they are computed."""
        output = self.run(parts)
        self._keep(parts)
        return output

    def _keep(self, parts: Sequence[Part]) -> None:
        """Record that parts of contexts are computed."""
        self._cache.keep([(part.context, part.start, part.start + len(part.tokens)) for part in parts])

    def _page_tables(self, parts: Sequence[Part], room: int) -> Int32Array:
        """The page tables of the parts, as far as they are used: int32 [parts, pages]."""
        ends = (part.start + len(part.tokens) + room for part in parts)
        width = pages_for(max(ends), self._page_size)
        if len(parts) == 1:
            return parts[0].context.pages[None, :width]
        return np.stack([part.context.pages[:width] for part in parts])


class DraftRunner(Passes[Float32Array]):
    """Runs a draft model; a pass gives logits, float32 [outputs, vocab]."""

    def __init__(self, backend: Backend, cache: DraftCache, vocab_size: int) -> None:
        super().__init__(cache, backend.page_size, backend.max_rows)
        self._backend = backend
        self._last_id = vocab_size - 1

    def run(self, parts: Sequence[Part]) -> Float32Array:
        batch = self.batch(parts)
        # for ids that the draft model lacks any valid id will do
        tokens = np.minimum(batch.tokens, self._last_id)
        return self._backend.forward(replace(batch, tokens=tokens)).logits


def _chain(context: Context, start: int, end: int, with_output: bool = False) -> Part:
    """Tokens start to end - 1 of a context as a part, with the logits of the last if wanted."""
    count = end - start
    outputs = (count - 1,) if with_output else ()
    return Part(context, start, context.tokens[start:end], range(-1, count - 1), outputs)
