"""The simulated parts around the real engine: clock, backend and drafters that only cost time.

The model counts: each token is followed by the next number. So drafters know what it would say, and are
right as often as they are configured to be; no answer depends on the drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.backends.base import Backend
from paceline.bench.simulate.costs import Call, CostModel, PassSize
from paceline.core.arrays import Int32Array
from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.request import Request
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter

VOCABULARY = 4  # size of the vocabulary
PAGE_SIZE = 16


class VirtualClock:
    """A clock that advances only when told to."""

    def __init__(self) -> None:
        self._now = 0.0
        self._crowded = False

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def is_crowded(self) -> bool:
        """Whether another replica of the same machine computes, which makes steps slower."""
        return self._crowded

    @contextmanager
    def crowding(self, crowded: bool) -> Iterator[None]:
        """A context in which `is_crowded` has this value: that of one step."""
        self._crowded = crowded
        try:
            yield
        finally:
            self._crowded = False


class CountingTokenizer:
    """Token ids without texts: an answer ends only by its length."""

    eos_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def is_special(self, token_id: int) -> bool:
        return False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []


@dataclass(frozen=True)
class NoPool:
    """A KV pool that stores nothing."""

    num_pages: int
    bytes_per_page: int = 0


class SimulatedBackend(Backend):
    """A backend whose passes take as long as they cost."""

    name = "simulated"
    page_size = PAGE_SIZE
    batch_invariant = True
    supports_features = False

    def __init__(self, costs: CostModel, clock: VirtualClock, max_rows: int) -> None:
        self._costs = costs
        self._clock = clock
        self.max_rows = max_rows
        # [vocabulary, vocabulary] logits after each token
        self._logits = np.roll(np.eye(VOCABULARY, dtype=np.float32), 1, axis=1)

    def make_pool(self, num_pages: int) -> NoPool:
        return NoPool(num_pages)

    def bytes_per_page(self) -> int:
        return 0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        size = PassSize(
            rows=batch.num_rows,
            requests=batch.num_requests,
            logits=len(batch.logit_rows),
            contexts=int(batch.context_lengths.sum()),
            keys=int(batch.positions.sum()) + batch.num_rows,
        )
        self._clock.advance(self._costs.pass_seconds(size) + self._costs.overhead_seconds(size))
        return ForwardOutput(self._logits[batch.tokens[batch.logit_rows]])

    def first_layers(self, count: int) -> Backend:
        raise NotImplementedError("a simulated model has no layers")

    def move(self, pool: object, source: Int32Array, destination: Int32Array) -> None:
        pass  # nothing is stored


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafts by depth, as fractions of all requested drafts."""

    accepted: tuple[float, ...]  # [depth] accepted down to this depth; not increasing
    drafted: tuple[float, ...] = ()  # [depth] drafted down to it, at least `accepted`; empty: all

    def __post_init__(self) -> None:
        if not self.drafted:
            object.__setattr__(self, "drafted", (1.0,) * len(self.accepted))
        assert len(self.drafted) == len(self.accepted) > 0

    @staticmethod
    def constant(alpha: float, depth: int) -> Acceptance:
        """Each token is accepted with probability `alpha` if all before it are."""
        return Acceptance(tuple(alpha ** (level + 1) for level in range(depth)))


class SimulatedDrafter(Drafter):
    """Drafts chains with a given acceptance, at the cost of a real drafter.

    Whether the token at a position of a request is predicted correctly is decided by that position's noise,
    so it does not depend on when it is drafted. A correct draft is at least as deep as it is correct:
    drafters that stop early do so where they would be wrong.
    """

    def __init__(
        self,
        name: str,
        acceptances: Sequence[Acceptance],
        costs: CostModel,
        clock: VirtualClock,
        tells_chances: bool = True,
    ) -> None:
        """Request i uses `acceptances[seed % len]`."""
        self.name = name
        self._costs = costs
        self._clock = clock
        self._tells_chances = tells_chances
        self._profiles = [_Profile(acceptance) for acceptance in acceptances]
        self._noise: dict[Request, npt.NDArray[np.float64]] = {}  # [2, output]

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        chains = [self._chain(request, plan) for request, plan in zip(requests, plans, strict=True)]
        lengths = [len(chain) for chain in chains]
        call = Call(self.name, len(requests), max(lengths), sum(lengths))
        self._clock.advance(self._costs.draft_seconds(call))
        chances = [
            self._profile_of(request).chances[:length]
            for request, length in zip(requests, lengths, strict=True)
        ]
        return DraftTrees.chains(chains, chances if self._tells_chances else None)

    def forget(self, request: Request) -> None:
        self._noise.pop(request, None)

    def _chain(self, request: Request, plan: DraftPlan) -> list[int]:
        """A draft for the request: correct tokens, then a wrong one and its continuation."""
        profile = self._profile_of(request)
        if request not in self._noise:
            bits = np.random.Philox(key=request.seed)
            self._noise[request] = np.random.Generator(bits).random((2, request.max_output))
        max_depth = min(plan.levels, profile.depth, request.max_output - request.num_output)
        noise = self._noise[request][:, request.num_output : request.num_output + max_depth]
        wrong = np.flatnonzero(noise[0] >= profile.going_on[:max_depth])
        right = int(wrong[0]) if len(wrong) else max_depth
        depth = max(right, int(np.count_nonzero(noise[1][:1] < profile.beyond[:max_depth])))
        last = request.token_ids[-1]
        return [(last + level + (level > right)) % VOCABULARY for level in range(1, depth + 1)]

    def _profile_of(self, request: Request) -> _Profile:
        return self._profiles[request.seed % len(self._profiles)]


class _Profile:
    """An acceptance as conditional probabilities, to sample drafts from."""

    def __init__(self, acceptance: Acceptance) -> None:
        accepted, drafted = np.array(acceptance.accepted), np.array(acceptance.drafted)
        above = np.concatenate([[1.0], accepted[:-1]])
        self.depth = len(accepted)
        # [depth] probability to be correct here, given that all before are
        self.going_on = np.divide(accepted, above, out=np.zeros(len(accepted)), where=above > 0)
        # [depth] probability that a draft is this deep, given that it is not correct this deep
        wrong = 1.0 - accepted
        beyond = np.divide(drafted - accepted, wrong, out=np.ones(len(accepted)), where=wrong > 0)
        self.beyond = np.minimum.accumulate(beyond)
        # [depth] probability that a draft of this depth is correct, as its drafter reports it
        chances = np.divide(accepted, drafted, out=np.zeros(len(accepted)), where=drafted > 0)
        self.chances: list[float] = np.minimum.accumulate(chances).tolist()
