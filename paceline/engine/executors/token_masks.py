"""TokenMasks: the token masks of a pass on the device, made by the host while the device computes its logits.

    device   | sample 1 | pass 2: draft, logits  | sample 2 | pass 3 ...
    host                read 1, masks of pass 2 ─^            ...

The mask of a row depends on all tokens up to it. So the masks of a pass are made once the pass before has
been read: until then the device has drafted and computes the logits, which need no masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.backends.async_decoding import DraftedRows
from paceline.core.arrays import Int32Array
from paceline.core.request import Request
from paceline.core.sampling import SamplingState
from paceline.errors import BackendError

ROOT = (np.zeros(1, dtype=np.int32), (-1,))  # the rows of a request without a draft


class TokenMasks:
    """Makes the masks, and remembers where none could be made."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # of the last masks: the error of each path, as drafted tokens after the root, that has no mask
        self._errors: dict[Request, dict[tuple[int, ...], BackendError]] = {}

    def of_pass(
        self, requests: Sequence[Request], drafted: DraftedRows | None
    ) -> tuple[Int32Array, list[Int32Array]]:
        """The rows of a pass over these requests that need a mask, and their masks.

        `drafted`: its drafts; None: there are none. Rows that cannot be reached have no mask.
        """
        self._errors = {}
        nodes = 1 if drafted is None else len(drafted.parents)
        rows, masks = [], []
        for place, request in enumerate(requests):
            if not request.sampling.is_masked or request.finished:
                continue
            tokens, parents = ROOT if drafted is None else (drafted.tokens[place], drafted.parents)
            if request.undrafted:
                tokens, parents = tokens[:1], parents[:1]
            for node, mask in self._of_request(request, tokens.tolist(), parents):
                rows.append(place * nodes + node)
                masks.append(mask)
        return np.array(rows, dtype=np.int32), masks

    def _of_request(
        self, request: Request, tokens: Sequence[int], parents: Sequence[int]
    ) -> list[tuple[int, Int32Array]]:
        """The nodes that can be accepted, and the masks of the tokens after them."""
        states: dict[int, SamplingState] = {}
        paths: dict[int, tuple[int, ...]] = {}
        masks: dict[int, Int32Array] = {}
        for node, parent in enumerate(parents):
            path: tuple[int, ...] = ()
            if parent >= 0:
                if parent not in masks or not self._allows(masks[parent], tokens[node]):
                    continue
                path = (*paths[parent], tokens[node])
                if request.ends_by(path[-1], request.num_output + len(path) - 1):
                    continue  # nothing follows
            try:
                state = request.sampling if parent < 0 else states[parent].branch(path[-1:])
                masks[node] = state.token_mask(request.num_output + len(path), self._vocab_size)
                states[node], paths[node] = state, path
            except BackendError as error:  # counts only if the output takes this path
                self._errors.setdefault(request, {})[path] = error
        return list(masks.items())

    def _allows(self, mask: Int32Array, token: int) -> bool:
        return 0 <= token < self._vocab_size and bool(mask[token >> 5] >> (token & 31) & 1)

    def error_on(self, request: Request, tokens: Sequence[int]) -> BackendError | None:
        """Why one of these tokens of the last pass has no meaning: it was sampled without its mask."""
        errors = self._errors.get(request, {})
        lengths = range(len(tokens))
        return next((errors[path] for n in lengths if (path := tuple(tokens[:n])) in errors), None)
