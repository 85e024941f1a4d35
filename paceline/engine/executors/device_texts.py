"""DeviceTexts: the requests whose texts are on the device, for passes that draft from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.backends.async_decoding import AsyncDecoder
from paceline.core.request import Request


class DeviceTexts:
    """Writes the text of each request once. From then on passes on the device append what they sample."""

    def __init__(self) -> None:
        self._written: dict[Request, tuple[int, int]] = {}  # the slot, and the tokens that were known then

    def write(self, decoder: AsyncDecoder, requests: Sequence[Request]) -> None:
        """Write the texts of these requests that are not on the device yet."""
        if new := [request for request in requests if request not in self._written]:
            texts = [np.array(request.token_ids, dtype=np.int32) for request in new]
            decoder.write_texts([request.slot for request in new], texts)
            self._written.update({request: (request.slot, len(request.token_ids)) for request in new})

    def forget(self, requests: Iterable[Request]) -> None:
        """Write the texts of these requests again when they are next needed."""
        for request in requests:
            self._written.pop(request, None)

    def forget_stale(self, requests: Iterable[Request]) -> None:
        """Forget those of these joining requests whose texts miss tokens, or are in another slot.

        A `join` writes only a request's last two tokens; host passes may have added more than these.
        """
        for request in requests:
            slot, known = self._written.get(request, (-1, 0))
            if slot != request.slot or known + 2 < len(request.token_ids):
                self._written.pop(request, None)

    def forget_finished(self) -> None:
        """Forget the texts of requests that have ended."""
        self._written = {request: text for request, text in self._written.items() if not request.finished}

    def clear(self) -> None:
        """Forget all texts."""
        self._written.clear()
