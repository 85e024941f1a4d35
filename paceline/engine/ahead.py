"""Plain decoding whose passes begin before the ones before them were read.

    device   | pass 1    | pass 2    | pass 3    | pass 4
    host     launch 1, 2 | read 1, launch 3      | ...        its work hides behind a pass

While all requests merely go on, a pass needs nothing from the host but room for its keys and values: the
tokens of the pass before it are where it runs. A request that ends leaves a row behind in the pass in flight,
which nobody reads. What that row writes lies behind the request's committed tokens, in a page of its own, and
whoever gets that page writes to it in a later pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from paceline.backends.base import AheadDecoder, Joining
from paceline.engine.request import Request
from paceline.kv.cache import KVCache

DEPTH = 2  # passes in flight when the first of them is read
FURTHER = (
    1  # tokens behind those of a pass that have their place before it begins, since it says where they go
)


class RunAhead:
    """The passes in flight. Without a decoder there are never any."""

    def __init__(self, decoder: AheadDecoder | None, kv: KVCache) -> None:
        self._decoder = decoder
        self._kv = kv
        self._flight: deque[list[Request]] = deque()
        self._known: set[Request] = set()  # to the decoder, in its present state
        self._error: Exception | None = None  # that a pass was lost by when it was to begin

    def holds(self, requests: Sequence[Request]) -> bool:
        """Whether the last pass in flight is of these requests."""
        return bool(self._flight) and self._flight[-1] == requests

    def has_pass(self) -> bool:
        """Whether there is a pass to read. If all its requests have ended, nobody needs to."""
        if self._flight and all(request.finished for request in self._flight[0]):
            self.drop()  # later passes have no others
        return bool(self._flight)

    @property
    def room(self) -> int:
        """Tokens behind those that are known whose places passes in flight write to or tell of."""
        return len(self._flight) - 1 + FURTHER if self._flight else 0

    def launch(self, requests: Sequence[Request]) -> None:
        """Begin passes over these requests, which all decode and race, as far as there is room for them."""
        try:
            while len(self._flight) < DEPTH and self._launch_one(requests):
                pass
        except Exception as error:  # whoever reads the pass is told
            self._error = error

    def _launch_one(self, requests: Sequence[Request]) -> bool:
        """Whether one more pass was begun."""
        ahead = len(self._flight)
        going = [request for request in requests if request.num_output + ahead < request.max_output]
        if self._decoder is None or not going:
            return False
        if not all(self._has_room(request, ahead) for request in going):
            return False  # what was reserved in vain is let go by the next commit
        new = [request for request in going if request not in self._known]
        if new:
            assert not self._flight, "who joins is known to the host alone"
            self._decoder.join(_joining(new))
            self._known.update(new)
        self._flight.append(going)
        self._decoder.launch([request.slot for request in going], self._kv.page_tables)
        return True

    def _has_room(self, request: Request, ahead: int) -> bool:
        """Whether there are pages for a pass behind so many others."""
        length = len(request.token_ids) + ahead + FURTHER
        most = len(request.prompt_token_ids) + request.max_output
        return self._kv.reserve(request.slot, min(length, most))

    def read(self) -> list[tuple[Request, int]]:
        """The tokens of the oldest pass, for requests that have not ended. -1: its logits were unusable.

        Raises what the passes in flight were lost by.
        """
        assert self._decoder is not None
        if self._error is not None:
            raise self._error
        tokens = self._decoder.read().tolist()
        pairs = zip(self._flight.popleft(), tokens, strict=True)
        return [(request, token) for request, token in pairs if not request.finished]

    def prepare(self) -> None:
        """Have ready what the first passes would wait for."""
        if self._decoder is not None:
            self._decoder.prepare()

    def leave(self) -> None:
        """Other passes follow: what the decoder knows of requests will be out of date."""
        self._known.clear()

    def drop(self) -> list[Request]:
        """Forget the passes in flight; the requests that wait for them."""
        assert self._decoder is not None
        lost = [request for request in self._flight[0] if not request.finished]
        self._decoder.drop()
        self._flight.clear()
        self._known.clear()
        self._error = None
        return lost


def _joining(requests: Sequence[Request]) -> Joining:
    return Joining(
        slots=np.array([request.slot for request in requests], dtype=np.int32),
        tokens=np.array([request.token_ids[-1] for request in requests], dtype=np.int32),
        lengths=np.array([request.num_computed for request in requests], dtype=np.int32),
        seeds=np.array([request.seed for request in requests], dtype=np.uint64),
        temperatures=np.array([request.params.temperature for request in requests], dtype=np.float64),
    )
