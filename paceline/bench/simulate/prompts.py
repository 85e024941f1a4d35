"""Prompts of simulated requests: made-up pages, equal where a trace says that prompts share them.

The simulated vocabulary has 4 tokens, so the 16 tokens of a page spell a number of 32 bits: the page's name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.bench.simulate.world import PAGE_SIZE, VOCABULARY
from paceline.bench.traffic.traces import BLOCK_TOKENS, Arrival
from paceline.errors import ConfigError

PAGES_PER_BLOCK = BLOCK_TOKENS // PAGE_SIZE
DIGITS = VOCABULARY ** np.arange(PAGE_SIZE, dtype=np.int64)  # [page] value of each token of a page

Names = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FleetRequest:
    """One request of a trace, with the names of its prompt's pages."""

    due: float  # seconds
    prompt_tokens: int
    answer_tokens: int
    pages: Names  # [pages of the prompt, the last one maybe not full]

    def token_ids(self) -> list[int]:
        """The prompt."""
        tokens = self.pages[:, None] // DIGITS % VOCABULARY  # [pages, page size]
        prompt: list[int] = tokens.ravel()[: self.prompt_tokens].tolist()
        return prompt


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefixes that prompts of a trace begin with, such as system prompts. Prefix k is k times as rare as
    the first (Zipf)."""

    count: int
    tokens: int

    def draw(self, count: int) -> list[int]:
        """The prefixes of that many requests; the same each time."""
        weights = [1 / rank for rank in range(1, self.count + 1)]
        return random.Random("prefixes").choices(range(self.count), weights, k=count)


def parse_shared_prefixes(text: str) -> SharedPrefixes:
    """The prefixes of a text such as 32x1024: 32 of 1,024 tokens each."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or min(int(match[1]), int(match[2])) < 1 or max(int(match[1]), int(match[2])) > 1 << 20:
        raise ConfigError(
            f"--shared-prefixes must be a number of prefixes and their length, such as 32x1024; got {text!r}."
        )
    return SharedPrefixes(int(match[1]), int(match[2]))


def fleet_requests(arrivals: Sequence[Arrival], shared: SharedPrefixes | None = None) -> list[FleetRequest]:
    """The requests of a trace. What no two prompts share is named once."""
    blocks = [arrival.blocks for arrival in arrivals]
    if shared is not None:
        blocks = [(prefix,) for prefix in shared.draw(len(arrivals))]
    block_pages = shared.tokens // PAGE_SIZE if shared else PAGES_PER_BLOCK
    unused = block_pages * (1 + max((max(some, default=0) for some in blocks), default=0))
    requests = []
    for number, (arrival, some) in enumerate(zip(arrivals, blocks, strict=True), 1):
        if arrival.prompt_tokens is None or arrival.answer_tokens is None:
            raise ConfigError(
                f"--trace: request {number} has no length. Add the columns ContextTokens and GeneratedTokens."
            )
        num_pages = -(-arrival.prompt_tokens // PAGE_SIZE)
        names = (np.array(some, dtype=np.int64)[:, None] * block_pages + np.arange(block_pages)).ravel()
        names = names[: num_pages - 1] if shared else names[:num_pages]  # a prompt is not all prefix
        own = np.arange(unused, unused + num_pages - len(names))
        unused += len(own)
        requests.append(
            FleetRequest(
                arrival.due, arrival.prompt_tokens, arrival.answer_tokens, np.concatenate([names, own])
            )
        )
    if unused > VOCABULARY**PAGE_SIZE:
        raise ConfigError(f"--trace has {unused:,} different pages of prompts. Take fewer with --limit.")
    return requests
