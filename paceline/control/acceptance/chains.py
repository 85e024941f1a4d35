"""Acceptance of chains that are drafted on the device: counts by depth, because nothing else comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.control.config import CONFIG
from paceline.control.cost import Float64Array
from paceline.core.stats import DraftFacts, ShadowFacts


class ChainAcceptance:
    """The chance that a drafted token is accepted at each depth, given that all before it were.

    Counts fade, so recent drafts count most. Where a draft ends early, or there is none, the next token
    counts as rejected.
    """

    def __init__(self, longest: int, chances: Sequence[float], weight: float, share: float = 1.0) -> None:
        """The prior: `chances` by depth (the last one holds for deeper tokens too), worth `weight` drafts;
        and the `share` of requests that have a draft."""
        known = np.array([*chances[:longest], *[chances[-1]] * (longest - len(chances))])
        self._tries = weight * np.cumprod([1.0, *known[:-1]])  # [depth]
        self._hits = self._tries * known  # [depth]
        self._asked, self._drafted = weight, weight * share  # requests, and those of them with a draft

    def add(self, drafts: Sequence[DraftFacts], requests: int, length: int) -> None:
        """Count the drafts of a pass in which each of `requests` could have a draft of this length."""
        fades = self._fades(length, requests)
        self._asked = fades[0] * self._asked + requests
        self._drafted = fades[0] * self._drafted + sum([draft.count for draft in drafts])
        accepted = np.zeros(length + 1, dtype=np.int64)
        untried = np.zeros(length, dtype=np.int64)
        for draft in drafts:
            accepted[min(draft.accepted, length)] += draft.count
            if draft.accepted == draft.depth < min(draft.nodes, length):
                # a request that ended within its draft says nothing of the tokens below
                untried[draft.depth] += draft.count
        reached = accepted[::-1].cumsum()[::-1]  # [depth] drafts accepted down to it
        reached[0] = requests
        self._tries[:length] = fades * self._tries[:length] + reached[:-1] - untried
        self._hits[:length] = fades * self._hits[:length] + reached[1:]

    def add_shadow(self, shadow: ShadowFacts) -> None:
        """Count shadow drafts."""
        length = min(len(self._tries), len(shadow.tries))
        fades = self._fades(length, shadow.tries[0])
        self._tries[:length] = fades * self._tries[:length] + shadow.tries[:length]
        self._hits[:length] = fades * self._hits[:length] + shadow.hits[:length]

    def _fades(self, length: int, drafts: int) -> Float64Array:
        """[length] factors on the counts after `drafts` new ones. Counts up to 1 do not fade to nothing."""
        fade = CONFIG.chains.fade ** min(drafts, CONFIG.chains.max_fades)
        return np.where(self._tries[:length] > 1.0, fade, 1.0)

    @property
    def share(self) -> float:
        """The fraction of requests that have a draft."""
        return float(self._drafted / self._asked)

    def accepted(self, length: int) -> float:
        """Expected accepted tokens of a draft of this length."""
        parent = CONFIG.chains.parent_weight
        reached, chance, expected = 1.0, float(self._hits[0] / self._tries[0]), 0.0
        for hits, tries in zip(self._hits[:length].tolist(), self._tries[:length].tolist(), strict=True):
            # at great depth little was seen: there the chance of the depth above holds
            chance = (hits + parent * chance) / (tries + parent)
            reached *= chance
            expected += reached
        return expected

    def facts(self) -> dict[str, list[float]]:
        """The counts as JSON values."""
        drafted = [float(self._asked), float(self._drafted)]
        return {"tries": self._tries.tolist(), "hits": self._hits.tolist(), "drafted": drafted}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Start from these facts. KeyError, ValueError or TypeError if they make no sense."""
        tries, hits = (np.array(facts[name], dtype=np.float64) for name in ("tries", "hits"))
        is_sound = tries.shape == hits.shape == self._tries.shape
        if not is_sound or not (hits >= 0.0).all() or not (hits <= tries).all() or not (tries > 0.0).all():
            raise ValueError("these are not counts of drafts")
        asked, drafted = (float(count) for count in facts["drafted"])
        if not 0.0 <= drafted <= asked or not asked > 0.0:
            raise ValueError("these are not counts of requests")
        self._tries, self._hits, self._asked, self._drafted = tries, hits, asked, drafted


def known_chances(known: Mapping[str, Any], drafter: str, greedy: bool) -> list[float]:
    """By depth, the chance of a drafter's tokens for greedy or other requests, given those before, from the
    facts of a memory (DrafterAcceptance.facts); empty if it holds none."""
    section = f"{drafter} greedy" if greedy else drafter
    said = known.get("models", {}).get(section, {}).get("said", [])
    if not said:
        return []
    reached = np.mean(said, axis=0)  # [depth] chance that a chain is accepted down to it
    return [min(1.0, float(chance)) for chance in reached / np.array([1.0, *reached[:-1]])]
