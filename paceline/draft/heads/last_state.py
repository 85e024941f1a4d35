"""The base of drafters that draft from the target's last hidden state of a request (medusa, assistant)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.arrays import Float32Array
from paceline.core.features import Features
from paceline.draft.base import Drafter, DrafterNeeds, DraftSampling, Target

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.core.verdict import Verdict
    from paceline.kv.cache import KVCache


class LastStateDrafter(Drafter):
    """Keeps, of each request, the normed last hidden state of its last computed token."""

    def __init__(self, target: Target, kv: KVCache) -> None:
        assert target.final_norm is not None
        self.needs = DrafterNeeds(feature_layers=(target.config.num_layers,))
        self._sampling: DraftSampling = target.sampling
        self._norm, self._eps = target.final_norm, target.config.rms_norm_eps
        self._kv = kv
        self._states: dict[Request, tuple[int, Float32Array]] = {}  # (position of its token, state [hidden])

    def _is_ready(self, request: Request) -> bool:
        """Whether it has the state of the token before the last."""
        state = self._states.get(request)
        return state is not None and state[0] == len(request.token_ids) - 2 == request.num_computed - 1

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        assert features is not None, "the engine provides what DrafterNeeds ask for"
        for index, (request, verdict) in enumerate(zip(requests, verdicts, strict=True)):
            values = features.committed(index, request, verdict, self.needs.feature_layers)
            if len(values):
                last = values[-1]
                state = last / np.sqrt(np.mean(last * last) + self._eps) * self._norm
                self._states[request] = request.num_computed - 1, state

    def forget(self, request: Request) -> None:
        self._states.pop(request, None)
