"""The KV cache of a draft model with another tokenizer than the target's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.draft.model.draft_cache import Context, Span, equal_prefix
from paceline.draft.model.vocabulary import Intersection
from paceline.kv.cache import KVCache

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.core.request import Request


@dataclass(slots=True)
class _Reading:
    """One request's text in the draft model's tokens. It only grows at its end."""

    tokens: list[int] = field(default_factory=list)
    num_read: int = 0  # tokens of the target that they spell
    slot: int = -1  # row of the page table; -1: it holds no pages
    computed: int = 0  # leading tokens with keys and values, while it has a slot
    drafted: Sequence[int] = ()  # drafted tokens computed after them


class SeparatePages:
    """A DraftCache with its own page table: the same text has other tokens, so other KV indices.

    It has as many pages as the target. When they run out, the least recently used request loses its pages
    and is computed again later.
    """

    def __init__(self, kv: KVCache, backend: Backend, longest: int, vocabulary: Intersection) -> None:
        """`longest` is the context of the draft model, in tokens."""
        self._kv = KVCache(kv.pages.num_pages, kv.page_size, len(kv.page_tables), longest)
        self.pool = self._kv.add_pool(backend)
        self._longest = longest
        self._vocabulary = vocabulary
        self._readings: OrderedDict[Request, _Reading] = OrderedDict()  # least recently used first

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Context | None]:
        for request in requests:
            self._readings.setdefault(request, _Reading())
            self._readings.move_to_end(request)
        pairs = zip(requests, budgets, strict=True)
        return [self._open(request, budget, len(requests)) for request, budget in pairs]

    def _open(self, request: Request, budget: int, in_use: int) -> Context | None:
        """A context; None if there is no room, even after evicting requests other than the last `in_use`."""
        reading = self._readings[request]
        reading.drafted = ()
        self._read(request, reading)
        room = min(budget, self._longest - len(reading.tokens))
        if not reading.tokens or room < 1:
            return None
        while not self._reserve(reading, len(reading.tokens) + room):
            if not self._evict(in_use):
                return None
        return Context(request, reading.tokens, self._kv.page_tables[reading.slot], room)

    def computed(self, contexts: Sequence[Context]) -> list[int]:
        return [self._readings[context.request].computed for context in contexts]

    def backlog(self, request: Request) -> int:
        reading = self._readings.get(request)
        computed = 0 if reading is None or reading.slot < 0 else reading.computed
        return max(len(request.token_ids) - 1 - computed, 0)  # an estimate: new tokens are not spelled yet

    def keep(self, spans: Sequence[Span]) -> None:
        for context, _, end in spans:
            self._readings[context.request].computed = end

    def keep_drafted(self, context: Context, tokens: Sequence[int]) -> None:
        self._readings[context.request].drafted = tokens

    def settle(self, request: Request, in_place: bool) -> None:
        reading = self._readings.get(request)
        if reading is not None and reading.drafted:  # `in_place` is about the target's pages, not ours
            self._read(request, reading)
            reading.computed += equal_prefix(reading.drafted, reading.tokens[reading.computed :])
            reading.drafted = ()

    def forget(self, request: Request) -> None:
        reading = self._readings.pop(request, None)
        if reading is not None:
            self._release(reading)

    def _read(self, request: Request, reading: _Reading) -> None:
        """Spell the request's new tokens in the draft model's."""
        for token in request.token_ids[reading.num_read :]:
            reading.tokens += self._vocabulary.spelling(token)
        reading.num_read = len(request.token_ids)

    def _reserve(self, reading: _Reading, length: int) -> bool:
        """Whether a reading has pages for `length` tokens now."""
        if reading.slot < 0:
            opened = self._kv.open(reading.tokens)
            if opened is None:
                return False
            reading.slot, reading.computed = opened
        self._kv.commit(reading.slot, reading.tokens, reading.computed - self._kv.length(reading.slot))
        return self._kv.reserve(reading.slot, length)

    def _evict(self, in_use: int) -> bool:
        """Whether pages were freed: those of the least recently used reading before the last `in_use`."""
        others = list(self._readings.values())[: len(self._readings) - in_use]
        victim = next((reading for reading in others if reading.slot >= 0), None)
        if victim is not None:
            self._release(victim)
        return victim is not None

    def _release(self, reading: _Reading) -> None:
        if reading.slot >= 0:
            self._kv.release(reading.slot)
            reading.slot, reading.drafted = -1, ()
