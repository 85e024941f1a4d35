"""Features: the target's hidden states that draft heads read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.arrays import Float32Array, Int32Array, Int64Array
from paceline.core.request import Request
from paceline.core.verdict import Verdict


@dataclass(frozen=True)
class Features:
    """The hidden states of a pass: per request the rows of its known tokens, then of its draft nodes."""

    values: Float32Array  # [rows, len(layers) * hidden]
    layers: tuple[int, ...]  # the layers that any drafter needs, ascending
    row_offsets: Int32Array  # [requests or more] the first row of each request
    context_lengths: Int32Array  # [requests] tokens that were committed before the pass
    num_tokens: Sequence[int]  # [requests] rows of known tokens

    def of_requests(self, chosen: Sequence[int]) -> Features:
        """The features of some of the requests, by index."""
        num_tokens = [self.num_tokens[index] for index in chosen]
        return replace(
            self,
            row_offsets=self.row_offsets[chosen],
            context_lengths=self.context_lengths[chosen],
            num_tokens=num_tokens,
        )

    def committed(
        self, index: int, request: Request, verdict: Verdict, layers: tuple[int, ...]
    ) -> Float32Array:
        """The features of the tokens that this pass committed for a request: [tokens, len(layers) * hidden].

        The first is that of token context_lengths[index]. It may be a view, valid until the next pass.
        """
        first, num_known = self.row_offsets[index], self.num_tokens[index]
        count = int(request.num_computed - self.context_lengths[index])
        nodes = verdict.accepted
        if nodes == tuple(range(len(nodes))):  # contiguous rows
            values = self.values[first : first + count]
        else:
            values = self.values[
                [*range(first, first + num_known), *(first + num_known + node for node in nodes)][:count]
            ]
        return values if layers == self.layers else values[:, self._columns(layers)]

    def committed_spans(self, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> Int64Array:
        """Runs of contiguous tokens that this pass committed: int64 [runs, 4].

        The columns of a run: the slot of its request, the position of its first token, the row of that
        token, and the number of tokens.
        """
        spans: list[tuple[int, int, int, int]] = []
        starts, rows = self.context_lengths.tolist(), self.row_offsets.tolist()
        for request, verdict, start, row, num_known in zip(
            requests, verdicts, starts, rows, self.num_tokens, strict=False
        ):
            nodes = verdict.accepted
            if not nodes or nodes == tuple(range(len(nodes))):  # contiguous rows
                spans.append((request.slot, start, row, request.num_computed - start))
                continue
            count = request.num_computed - start
            spans.append((request.slot, start, row, num_known))
            for offset, node in enumerate(nodes[: count - num_known], num_known):
                spans.append((request.slot, start + offset, row + num_known + node, 1))
        return np.array(spans, dtype=np.int64)

    def _columns(self, layers: Sequence[int]) -> Int64Array:
        """The columns of these layers' hidden states, in this order."""
        hidden = self.values.shape[1] // len(self.layers)
        starts = [self.layers.index(layer) * hidden for layer in layers]
        return np.concatenate([np.arange(start, start + hidden) for start in starts])
