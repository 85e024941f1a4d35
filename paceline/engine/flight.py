"""What passes that run ahead are made of: those in flight, those that were read, and who joins them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.backends.ahead import Joining
from paceline.core.features import Features
from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.trees import PLAIN, DraftPlan
from paceline.core.verdict import Verdict
from paceline.engine.facts import Shape


@dataclass(frozen=True)
class PromptPass:
    """A pass over prompts that has begun."""

    parts: list[Scheduled]
    batch: ForwardBatch
    output: Callable[[], ForwardOutput]  # waits for it


@dataclass(frozen=True)
class Flying:
    """A pass in flight."""

    requests: list[Request]
    plan: DraftPlan = PLAIN
    prompts: PromptPass | None = None  # None: they decode


@dataclass(frozen=True)
class PassAhead:
    """A pass of decoding that ran ahead, when it is read."""

    parts: list[Scheduled]
    verdicts: list[Verdict]
    levels: int  # of the rows behind each part's own, which are chains
    shapes: list[Shape]  # of the drafts; their tokens stayed where they were made
    features: Features | None

    @property
    def num_rows(self) -> int:
        return (1 + self.levels) * len(self.parts)

    @property
    def attended(self) -> int:
        """Keys of committed tokens that its rows read, summed over the rows. Before requests advance."""
        return (1 + self.levels) * sum([part.request.num_computed for part in self.parts])


def joining(requests: Sequence[Request], with_texts: bool = False) -> Joining:
    """What a decoder must know of requests that it does not know yet; for look-ups all of their texts."""
    params = [request.params for request in requests]
    return Joining(
        slots=np.array([request.slot for request in requests], dtype=np.int32),
        tokens=np.array([[0, *request.token_ids[-2:]][-2:] for request in requests], dtype=np.int32),
        lengths=np.array([request.num_computed for request in requests], dtype=np.int32),
        limits=np.array([request.most_tokens - 1 for request in requests], dtype=np.int32),
        seeds=np.array([request.seed for request in requests], dtype=np.uint64),
        temperatures=np.array([own.temperature for own in params], dtype=np.float64),
        takes_drafts=np.array([not request.undrafted for request in requests]),
        kept=np.array([(own.top_k, own.top_p, own.min_p) for own in params], dtype=np.float64),
        texts=[np.array(own.token_ids, dtype=np.int32) for own in requests] if with_texts else None,
    )
