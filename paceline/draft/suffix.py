"""Suffix drafting: all that followed the end of this text before, here and in past responses, votes.

The end of the text is looked for in the request's own tokens and in a cache of past responses: those to
requests of its own `cache_salt`, never those to others. A follower's probability mixes the shares of
matches of every length, the longest last, so that it is high where a long match or many short ones
agree. A draft goes on as long as the probability that all of it is accepted is worth a row of the pass.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.backends.async_decoding import NgramLookup
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter, Target, TextDrafts
from paceline.draft.matching import COLUMNS, draft_trees
from paceline.draft.ngram import RequestIndexes
from paceline.draft.suffix_store import DamagedStoreError, ResponseCache, fingerprint_of
from paceline.errors import ConfigError
from paceline.options import check_integer, check_number, refuse_unknown

if TYPE_CHECKING:
    from paceline.core.request import Request

logger = logging.getLogger(__name__)

LEVELS = (1, 3, 8, 24)  # n-grams that are indexed; what lies between is found on the level below
# What a decoder looks up where it runs, if what was drafted in advance is of no help: rows of its passes are
# computed anyway, so also behind one token. Longer matches gained nothing in simulation.
LOOK_UP = NgramLookup(1, 4)
SHARES = ("responses", "prompts", "off")


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class SuffixOptions:
    """What is looked for and how long it is followed, as vLLM names it, and where the cache is kept."""

    suffix_decoding_max_tree_depth: int = 24  # longest match that is looked for
    suffix_decoding_max_cached_requests: int = 10_000  # past responses that are kept; 0: none
    suffix_decoding_max_spec_factor: float = 4.0  # a match of n tokens is followed for this many times n
    suffix_decoding_min_token_prob: float = 0.2  # of a node's path, to be drafted
    suffix_cache_path: str | None = None  # a file where past responses survive a restart
    # what a request leaves for later ones of its salt: its response, the end of its prompt too, or nothing
    share_suffix_cache: str = "responses"

    def __post_init__(self) -> None:
        check_integer(
            ConfigError, "suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1, 256
        )
        cached = self.suffix_decoding_max_cached_requests
        check_integer(
            ConfigError, "suffix_decoding_max_cached_requests", cached, 0, 1_000_000, "0 turns it off."
        )
        factor = self.suffix_decoding_max_spec_factor
        check_number(ConfigError, "suffix_decoding_max_spec_factor", factor, 0.0, 1e6, low_open=True)
        least = self.suffix_decoding_min_token_prob
        check_number(ConfigError, "suffix_decoding_min_token_prob", least, 0.0, 1.0)
        path = self.suffix_cache_path
        if path is not None and (not isinstance(path, str) or not path):
            raise ConfigError(f"suffix_cache_path must be the path of a file, got {path!r}.")
        if self.share_suffix_cache not in SHARES:
            raise ConfigError(
                f"share_suffix_cache must be one of {', '.join(SHARES)}, got {self.share_suffix_cache!r}."
            )
        if path is not None and self.num_cached == 0:
            off = "share_suffix_cache is off" if cached else "suffix_decoding_max_cached_requests is 0"
            raise ConfigError(f"suffix_cache_path keeps past responses, but {off}. Leave one of them out.")

    @property
    def num_cached(self) -> int:
        """How many past responses are kept."""
        return 0 if self.share_suffix_cache == "off" else self.suffix_decoding_max_cached_requests


class SuffixDrafter(Drafter):
    """Drafts what followed the end of the text, here and in past responses. Chains or trees."""

    name = "suffix"
    follows_prefix = True
    device = TextDrafts(LOOK_UP)
    Options = SuffixOptions

    def __init__(self, options: SuffixOptions, fingerprint: str = "", vocab_size: int = 0) -> None:
        """`fingerprint` and `vocab_size` are those of the tokenizer, for the file of the cache."""
        self._options = options
        self._levels = [level for level in LEVELS if level <= options.suffix_decoding_max_tree_depth]
        self._indexes = RequestIndexes(self._levels)
        with_prompts = options.share_suffix_cache == "prompts"
        self._past = ResponseCache(self._levels, options.num_cached, with_prompts)
        self._path = Path(options.suffix_cache_path) if options.suffix_cache_path else None
        self._fingerprint = fingerprint
        if self._path is not None:
            self._read(self._path, vocab_size)

    def _read(self, path: Path, vocab_size: int) -> None:
        """Begin with what a file has. A damaged one is kept aside, and the cache begins empty."""
        if not os.access(path.parent, os.W_OK) or (path.exists() and not path.is_file()):
            raise ConfigError(
                f"suffix_cache_path {str(path)!r} cannot be written. Give a file in a folder that exists and "
                "that you may write to."
            )
        if not path.exists():
            return
        try:
            self._past.load(path, self._fingerprint, vocab_size)
        except DamagedStoreError as error:
            aside = path.with_name(f"{path.name}.damaged")
            path.replace(aside)
            logger.warning("%s. It is kept as %s, and the cache begins empty.", error, aside.name)

    @classmethod
    def load(cls, options: SuffixOptions, target: Target) -> SuffixDrafter:
        """The drafter with these options, and with the past responses of its file if it has one."""
        if options.suffix_cache_path is None:
            drafter = cls(options)
        else:
            drafter = cls(options, fingerprint_of(target.tokenizer), target.config.vocab_size)
        drafter.propose([], [])  # compiles it
        return drafter

    def prepare(self) -> None:
        self._past.occurrences.take_memory()

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One chain or tree per request; smaller than the plan where more would not be accepted."""
        options, past = self._options, self._past.occurrences
        usual = float(options.suffix_decoding_min_token_prob)
        lines: list[tuple[int, ...]] = []
        new: list[int] = []
        for request, plan in zip(requests, plans, strict=True):
            index, unread = self._indexes.unread(request, plan.prefix)
            asked = (len(unread), plan.budget, plan.branching, plan.levels)
            lines.append((*index.described(), *asked, self._past.owner_of(request.cache_salt)))
            new += unread
            index.note_appended(len(unread))
        drafted = draft_trees(
            np.array(lines, dtype=np.int64).reshape(-1, COLUMNS),
            np.array(new, dtype=np.int32),
            np.array([plan.least_chance or usual for plan in plans], dtype=np.float64),
            past.table,
            past.oldest,
            past.end,
            past.levels,
            options.suffix_decoding_max_tree_depth,
            float(options.suffix_decoding_max_spec_factor),
        )
        return DraftTrees(*drafted[:3], chances=drafted[3])

    def forget(self, request: Request) -> None:
        """Keep the response for later requests of its salt, unless it failed."""
        self._indexes.drop(request)
        if request.error is None:
            self._past.add(request.prompt_token_ids, request.output_token_ids, request.cache_salt)

    def save(self) -> None:
        """Write the past responses to the file that the options name; nothing if they name none."""
        if self._path is not None:
            self._past.save(self._path, self._fingerprint)

    def close(self) -> None:
        self.save()
