"""Hidden states of the target that draft heads read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.arrays import Float32Array, Int32Array, Int64Array
from paceline.core.request import Request
from paceline.core.verdict import Verdict


@dataclass(frozen=True)
class Features:
    """Hidden states of the rows of a pass: of each request its own tokens', then its draft's nodes'."""

    values: Float32Array  # [rows, len(layers) * hidden]
    layers: tuple[int, ...]  # what all drafters need, ascending
    row_offsets: Int32Array  # [at least requests] where the rows of each begin
    context_lengths: Int32Array  # [requests] tokens that were committed before the pass
    num_tokens: Sequence[int]  # [requests] rows that are its own tokens

    def of_requests(self, chosen: Sequence[int]) -> Features:
        """Those of some of the requests."""
        own = [self.num_tokens[index] for index in chosen]
        return replace(
            self,
            row_offsets=self.row_offsets[chosen],
            context_lengths=self.context_lengths[chosen],
            num_tokens=own,
        )

    def committed(
        self, index: int, request: Request, verdict: Verdict, layers: tuple[int, ...]
    ) -> Float32Array:
        """Those of the tokens that a request has committed with this pass: [tokens, len(layers) * hidden].

        The first is that of token context_lengths[index]. It may be a view, good until the next pass.
        """
        first, own = self.row_offsets[index], self.num_tokens[index]
        count = int(request.num_computed - self.context_lengths[index])
        nodes = verdict.accepted
        if nodes == tuple(range(len(nodes))):  # nothing lies between them
            values = self.values[first : first + count]
        else:
            values = self.values[
                [*range(first, first + own), *(first + own + node for node in nodes)][:count]
            ]
        return values if layers == self.layers else values[:, self._columns(layers)]

    def committed_spans(self, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> Int64Array:
        """Where those of all tokens are that were committed with this pass, in runs: [runs, 4].

        A run's columns: the slot of its request, the position of its first token, the row of that, and how
        many tokens follow each other in both.
        """
        spans: list[tuple[int, int, int, int]] = []
        starts, rows = self.context_lengths.tolist(), self.row_offsets.tolist()
        for request, verdict, start, row, own in zip(
            requests, verdicts, starts, rows, self.num_tokens, strict=False
        ):
            nodes = verdict.accepted
            if not nodes or nodes == tuple(range(len(nodes))):  # nothing lies between them
                spans.append((request.slot, start, row, request.num_computed - start))
                continue
            count = request.num_computed - start
            spans.append((request.slot, start, row, own))
            for place, node in enumerate(nodes[: count - own], own):
                spans.append((request.slot, start + place, row + own + node, 1))
        return np.array(spans, dtype=np.int64)

    def _columns(self, layers: Sequence[int]) -> Int64Array:
        """The columns of these layers' hidden states, in this order."""
        hidden = self.values.shape[1] // len(self.layers)
        starts = [self.layers.index(layer) * hidden for layer in layers]
        return np.concatenate([np.arange(start, start + hidden) for start in starts])
