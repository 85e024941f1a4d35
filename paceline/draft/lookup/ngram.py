"""Prompt lookup (n-gram drafting): copy what followed the text's last n tokens the last time.

The longest n-gram at the end of the text that occurred before is used, at its newest occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.backends.async_decoding import NgramLookup
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter, Target
from paceline.draft.device import TextDrafts
from paceline.draft.lookup.ngram_index import copy_longest
from paceline.draft.lookup.occurrences import Occurrences
from paceline.errors import ConfigError
from paceline.options import check_integer, refuse_unknown

if TYPE_CHECKING:
    from paceline.core.request import Request


class RequestIndexes:
    """The n-gram index of each request's own text, made on first use and then extended."""

    def __init__(self, levels: Sequence[int]) -> None:
        self._levels = tuple(levels)
        self._indexes: dict[Request, Occurrences] = {}

    def of(self, request: Request, prefix: Sequence[int] = ()) -> Occurrences:
        """The index of all tokens that the request has now, and of `prefix`: forced tokens that come next."""
        index, new = self.unread(request, prefix)
        index.append(new)
        return index

    def unread(self, request: Request, prefix: Sequence[int] = ()) -> tuple[Occurrences, list[int]]:
        """The index of a request, and those of its tokens (then `prefix`) that are not in it yet."""
        index = self._indexes.get(request)
        if index is None:
            capacity = len(request.prompt_token_ids) + request.max_output
            index = self._indexes[request] = Occurrences(self._levels, max(capacity, len(request.token_ids)))
        indexed, tokens = len(index), request.token_ids
        return index, [*tokens[indexed:], *prefix[max(indexed - len(tokens), 0) :]]

    def drop(self, request: Request) -> None:
        self._indexes.pop(request, None)


class NgramDrafter(Drafter):
    """Drafts chains: what followed the newest occurrence of the longest n-gram."""

    name = "ngram"
    follows_prefix = True

    @refuse_unknown(ConfigError)
    @dataclass(frozen=True)
    class Options:
        """The smallest and largest n to look up, under vLLM's names."""

        prompt_lookup_max: int = 4
        prompt_lookup_min: int | None = None  # None: 2, or prompt_lookup_max if that is less

        def __post_init__(self) -> None:
            check_integer(ConfigError, "prompt_lookup_max", self.prompt_lookup_max, 1, 64)
            remedy = "It may not be above prompt_lookup_max."
            check_integer(ConfigError, "prompt_lookup_min", self.shortest, 1, self.prompt_lookup_max, remedy)

        @property
        def shortest(self) -> int:
            least = self.prompt_lookup_min
            return min(2, self.prompt_lookup_max) if least is None else least

    def __init__(self, options: Options) -> None:
        self._indexes = RequestIndexes(range(options.shortest, options.prompt_lookup_max + 1))
        # not optimistic: the device finds the same chains itself, with the newest tokens
        self.device = TextDrafts(NgramLookup(options.shortest, options.prompt_lookup_max), optimistic=False)

    @classmethod
    def load(cls, options: Options, target: Target) -> NgramDrafter:
        """The drafter with these options."""
        empty, chain = Occurrences([1], 1), np.empty(1, dtype=np.int32)
        empty.append([])  # compiles it, and the next line the search
        copy_longest(empty.table, empty.levels, empty.oldest, empty.end, chain)
        return cls(options)

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One chain per request."""
        tokens = np.empty(sum([plan.levels for plan in plans]), dtype=np.int32)
        offsets = [0]
        parents: list[int] = []
        for request, plan in zip(requests, plans, strict=True):
            index = self._indexes.of(request, plan.prefix)
            room = slice(offsets[-1], offsets[-1] + plan.levels)
            size = copy_longest(index.table, index.levels, index.oldest, index.end, tokens[room])
            offsets.append(offsets[-1] + size)
            parents += range(-1, size - 1)
        ends = np.array(offsets, dtype=np.int32)
        return DraftTrees(tokens[: offsets[-1]], np.array(parents, dtype=np.int32), ends)

    def forget(self, request: Request) -> None:
        self._indexes.drop(request)
