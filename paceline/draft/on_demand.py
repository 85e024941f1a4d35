"""OnDemandDrafter: a method that is not configured, and is loaded when a request first names it.

`ngram` and `suffix` need nothing but the texts of requests, so every engine can offer them: until one is
asked for, it takes no memory and no time to start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter

if TYPE_CHECKING:
    from paceline.core.request import Request


class OnDemandDrafter(Drafter):
    """Drafts as the method that `load` gives, and only for requests that ask for it by name."""

    # Device passes have buffers and graphs for configured drafters only: memory was sized for those.
    device = None
    # Loading takes 0.2 s if the method's kernels are in the cache. Where they have to be compiled, which
    # takes many seconds, other requests do not wait for it: nothing is drafted until it is done.
    max_wait = 1.0  # seconds that the first call waits for `load`

    def __init__(self, name: str, load: Callable[[], Drafter]) -> None:
        self.name = name
        self.follows_prefix = False  # until it is loaded
        self._load = load
        self._loading: Future[Drafter] | None = None
        self._requests: set[Request] = set()  # that it has drafted for

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        drafter = self._loaded()
        if drafter is None:
            return DraftTrees.chains([()] * len(requests))
        self.follows_prefix = drafter.follows_prefix
        self._requests.update(requests)
        return drafter.propose(requests, plans)

    def forget(self, request: Request) -> None:
        if request in self._requests:  # so a suffix cache has only the responses to requests that named it
            self._requests.remove(request)
            assert self._loading is not None
            self._loading.result().forget(request)

    def _loaded(self) -> Drafter | None:
        """The drafter; None while it is being loaded. The first call starts that. Raises if it failed."""
        if self._loading is None:
            self._loading = Future()
            threading.Thread(target=_run, args=(self._load, self._loading), daemon=True).start()
            try:
                return self._loading.result(self.max_wait)
            except TimeoutError:
                return None
        return self._loading.result() if self._loading.done() else None


def _run(load: Callable[[], Drafter], loading: Future[Drafter]) -> None:
    try:
        loading.set_result(load())
    except Exception as error:  # raised by the next call; its requests continue without drafts
        loading.set_exception(error)
