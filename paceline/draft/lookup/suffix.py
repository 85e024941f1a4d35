"""Suffix decoding: what followed the text's suffix before, here and in past responses, votes on what follows.

The suffix is looked up in the request's own tokens and in a store of past responses: those to requests of
the same `cache_salt`, never others. A token's probability mixes the votes of matches of every length, the
longest last, so it is high where a long match or many short ones agree. A path is drafted as long as the
probability that all of it is accepted is worth a row of the pass.
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
from paceline.draft.base import Drafter, Target
from paceline.draft.device import TextDrafts
from paceline.draft.lookup.ngram import RequestIndexes
from paceline.draft.lookup.suffix_store import DamagedStoreError, ResponseCache, fingerprint_of
from paceline.draft.lookup.suffix_trees import REQUEST_COLUMNS, draft_trees
from paceline.errors import ConfigError
from paceline.options import check_integer, check_number, refuse_unknown

if TYPE_CHECKING:
    from paceline.core.request import Request

logger = logging.getLogger(__name__)

LEVELS = (1, 3, 8, 24)  # the indexed n; a match of a length between two levels is found on the lower one
# Prompt lookup on the device, where the optimistic host draft does not match. From 1 token, because the rows
# of such a pass are computed anyway; more than 4 gained nothing in simulation.
LOOK_UP = NgramLookup(1, 4)
SHARES = ("responses", "prompts", "off")  # values of share_suffix_cache


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class SuffixOptions:
    """The options of suffix decoding under vLLM's names, and where past responses are stored."""

    suffix_decoding_max_tree_depth: int = 24  # tokens of the longest match
    suffix_decoding_max_cached_requests: int = 10_000  # past responses in the store; 0: none
    suffix_decoding_max_spec_factor: float = 4.0  # a match of n tokens is followed for this many times n
    suffix_decoding_min_token_prob: float = 0.2  # a node is drafted if its path has this probability
    suffix_cache_path: str | None = None  # a file in which past responses survive a restart
    # what a request stores for later ones of its salt: its response, also the end of its prompt, or nothing
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
        min_prob = self.suffix_decoding_min_token_prob
        check_number(ConfigError, "suffix_decoding_min_token_prob", min_prob, 0.0, 1.0)
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
        """The number of past responses that are stored."""
        return 0 if self.share_suffix_cache == "off" else self.suffix_decoding_max_cached_requests


class SuffixDrafter(Drafter):
    """Drafts what followed the text's suffix, here and in past responses. Chains or trees."""

    name = "suffix"
    follows_prefix = True
    device = TextDrafts(LOOK_UP)
    Options = SuffixOptions

    def __init__(self, options: SuffixOptions, fingerprint: str = "", vocab_size: int = 0) -> None:
        """`fingerprint` and `vocab_size` are the tokenizer's; they are checked against the file."""
        self._options = options
        self._levels = [level for level in LEVELS if level <= options.suffix_decoding_max_tree_depth]
        self._indexes = RequestIndexes(self._levels)
        with_prompts = options.share_suffix_cache == "prompts"
        self._past = ResponseCache(self._levels, options.num_cached, with_prompts)
        self._path = Path(options.suffix_cache_path) if options.suffix_cache_path else None
        self._fingerprint = fingerprint
        self.memory = self
        if self._path is not None:
            self._read(self._path, vocab_size)

    def _read(self, path: Path, vocab_size: int) -> None:
        """Load past responses from a file. A damaged file is renamed, and the store starts empty."""
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
        """The drafter with these options, and with the past responses of its file if there is one."""
        if options.suffix_cache_path is None:
            drafter = cls(options)
        else:
            drafter = cls(options, fingerprint_of(target.tokenizer), target.config.vocab_size)
        drafter.propose([], [])  # compiles it
        drafter._past.occurrences.take_memory()
        return drafter

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One chain or tree per request, without nodes that are unlikely to be accepted."""
        options, past = self._options, self._past.occurrences
        default_chance = float(options.suffix_decoding_min_token_prob)
        rows: list[tuple[int, ...]] = []
        new: list[int] = []
        for request, plan in zip(requests, plans, strict=True):
            index, unread = self._indexes.unread(request, plan.prefix)
            limits = (len(unread), plan.budget, plan.branching, plan.levels)
            rows.append((*index.table_fields(), *limits, self._past.namespace_of(request.cache_salt)))
            new += unread
            index.note_appended(len(unread))
        drafted = draft_trees(
            np.array(rows, dtype=np.int64).reshape(-1, REQUEST_COLUMNS),
            np.array(new, dtype=np.int32),
            np.array([plan.least_chance or default_chance for plan in plans], dtype=np.float64),
            past.table,
            past.oldest,
            past.end,
            past.levels,
            options.suffix_decoding_max_tree_depth,
            float(options.suffix_decoding_max_spec_factor),
        )
        return DraftTrees(*drafted[:3], chances=drafted[3])

    def forget(self, request: Request) -> None:
        """Store the response for later requests of its salt, unless the request failed."""
        self._indexes.drop(request)
        if request.error is None:
            self._past.add(request.prompt_token_ids, request.output_token_ids, request.cache_salt)

    def remember(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._past.add(prompt, output)

    def save(self) -> None:
        """Write the past responses to `suffix_cache_path`, if that is set."""
        if self._path is not None:
            self._past.save(self._path, self._fingerprint)
