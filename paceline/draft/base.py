"""The contract of a drafter: a cheap guesser of the target's next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from paceline.draft.trees import DraftPlan, DraftTrees

if TYPE_CHECKING:
    from paceline.engine.request import Request
    from paceline.verify.pathwise import Verdict


@dataclass(frozen=True)
class DrafterNeeds:
    """What a drafter wants from the engine, declared as data."""

    feature_layers: tuple[int, ...] = ()  # hidden states it reads: 0 is the embedding, i is after layer i - 1


@dataclass(frozen=True)
class Features:
    """Hidden states of the rows of a pass. Rows of request i start at row_offsets[i]."""

    values: npt.NDArray[np.float32]  # [rows, len(feature_layers) * hidden]
    row_offsets: npt.NDArray[np.int32]  # [requests + 1]


class Drafter(Protocol):
    """Proposes trees, and learns from what became of every pass, its own or not."""

    name: str
    needs: DrafterNeeds

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One tree per request, within its plan's budget. May be empty."""
        ...

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        """Take in a pass, after the requests advanced; prefill chunks too, so no position is missed."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        ...
