"""Which replica gets a request: one that has its prefix cached, unless another is much less loaded.

A replica's score is counted in pages, the unit that a cached prefix saves:

    pages of the prompt that it has cached
    + session_pages, if it served the session's last request     (its suffix store knows the session too)
    - pages_per_request * requests that it has now

So a long cached prefix is worth a longer queue than a short one, and a prefix that many requests share
spreads: once a second replica has served it, both have it cached, and load decides between them. Among
equal scores the replica that was used least recently comes first.

The policy remembers where it sent which pages; it asks no replica. It is deterministic and has no clock.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.errors import ConfigError
from paceline.options import check_integer, check_number, refuse_unknown


class Routing(Protocol):
    """A routing policy. Replicas are names."""

    def rank(self, prefix_hashes: Sequence[int], session: str | None, loads: Mapping[str, int]) -> list[str]:
        """All replicas of `loads` (requests that each has now), the best one first.

        `prefix_hashes` are those of the prompt's whole pages, as of `page_hashes`.
        """
        ...

    def record(self, replica: str, prefix_hashes: Sequence[int], session: str | None) -> None:
        """Record that a replica got this request."""
        ...

    def forget(self, replica: str) -> None:
        """Forget a replica that is gone or whose cache is empty."""
        ...


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class RoutingOptions:
    """What the routing policy weighs, and how much it remembers."""

    pages_per_request: float = 8.0  # cached pages that are worth one more request in a replica's queue
    session_pages: float = 16.0  # cached pages that a session's last replica is worth
    max_pages: int = 65_536  # remembered per replica; at best the pages of its KV cache
    max_sessions: int = 65_536  # remembered in all

    def __post_init__(self) -> None:
        for name in ("pages_per_request", "session_pages"):
            check_number(ConfigError, name, getattr(self, name), 0, 1e9)
        for name in ("max_pages", "max_sessions"):
            check_integer(ConfigError, name, getattr(self, name), 1, None)


class PrefixRouting:
    """Cached prefix and session first, load second."""

    def __init__(self, options: RoutingOptions | None = None) -> None:
        self._options = options or RoutingOptions()
        self._replicas: dict[str, _Replica] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()  # the last replica of each, oldest first
        self._num_recorded = 0

    def rank(self, prefix_hashes: Sequence[int], session: str | None, loads: Mapping[str, int]) -> list[str]:
        options = self._options
        last = None if session is None else self._sessions.get(session)

        def order(name: str) -> tuple[float, int, str]:
            replica = self._replicas.get(name, _NEW)
            score = replica.num_cached(prefix_hashes) - options.pages_per_request * loads[name]
            return -score - options.session_pages * (name == last), replica.last_used, name

        return sorted(loads, key=order)

    def record(self, replica: str, prefix_hashes: Sequence[int], session: str | None) -> None:
        self._num_recorded += 1
        self._replicas.setdefault(replica, _Replica()).add(
            prefix_hashes, self._options.max_pages, self._num_recorded
        )
        if session is not None:
            self._sessions[session] = replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._options.max_sessions:
                self._sessions.popitem(last=False)

    def forget(self, replica: str) -> None:
        self._replicas.pop(replica, None)
        for session in [session for session, last in self._sessions.items() if last == replica]:
            del self._sessions[session]


@dataclass
class _Replica:
    """The pages that a replica probably has cached: the last ones that it got."""

    pages: OrderedDict[int, None] = field(default_factory=OrderedDict)  # by hash, oldest first
    last_used: int = 0

    def num_cached(self, prefix_hashes: Sequence[int]) -> int:
        """The number of leading pages that are cached. A cached page's ancestors are, hence the bisection."""
        return bisect_left(prefix_hashes, True, key=lambda page: page not in self.pages)

    def add(self, prefix_hashes: Sequence[int], max_pages: int, now: int) -> None:
        self.last_used = now
        for page in reversed(prefix_hashes):  # the last page is the oldest: it goes before its ancestors
            self.pages[page] = None
            self.pages.move_to_end(page)
        while len(self.pages) > max_pages:
            self.pages.popitem(last=False)


_NEW = _Replica()


class LeastLoadedRouting:
    """By load only, least recently used first among equals. A baseline."""

    def __init__(self) -> None:
        self._policy = PrefixRouting(RoutingOptions(session_pages=0))

    def rank(self, prefix_hashes: Sequence[int], session: str | None, loads: Mapping[str, int]) -> list[str]:
        return self._policy.rank((), None, loads)

    def record(self, replica: str, prefix_hashes: Sequence[int], session: str | None) -> None:
        self._policy.record(replica, (), None)

    def forget(self, replica: str) -> None:
        self._policy.forget(replica)


class RandomRouting:
    """A random replica, by a seeded generator. A baseline."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def rank(self, prefix_hashes: Sequence[int], session: str | None, loads: Mapping[str, int]) -> list[str]:
        return self._random.sample(sorted(loads), len(loads))

    def record(self, replica: str, prefix_hashes: Sequence[int], session: str | None) -> None:
        pass  # nothing is remembered

    def forget(self, replica: str) -> None:
        pass
