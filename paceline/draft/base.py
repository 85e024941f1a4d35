"""The contract of a drafter: a cheap guesser of the target's next tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from paceline.core.arrays import Float32Array
from paceline.core.features import Features
from paceline.core.trees import DraftPlan, DraftTrees

if TYPE_CHECKING:
    from paceline.backends.async_decoding import DeviceDraft, NgramLookup
    from paceline.backends.base import Backend
    from paceline.backends.options import BackendOptions
    from paceline.core.forward import KeptFeatures
    from paceline.core.request import Request
    from paceline.core.verdict import Verdict
    from paceline.kv.cache import KVCache
    from paceline.models.checkpoint import Tensor
    from paceline.models.config import ModelConfig
    from paceline.models.tokenizer import Tokenizer


# Passes that an optimistic draft reaches over at most: the one in flight, the one that follows it, and two
# more, since with many requests it is a while until one is drafted for again.
OPTIMISTIC_PASSES = 4


@dataclass(frozen=True)
class DrafterNeeds:
    """What a drafter wants from the engine, declared as data."""

    feature_layers: tuple[int, ...] = ()  # hidden states it reads: 0 is the embedding, i is after layer i - 1
    bytes_per_page: int = 0  # of keys and values that it keeps for each page of the target's
    target_pages: bool = False  # it writes its guesses to the target's pages: no pass may be in flight then


class DraftSampling(Enum):
    """How a drafter that has a distribution turns it into tokens. At temperature 0 it is always GREEDY."""

    GREEDY = "greedy"  # the likeliest
    COUPLED = "coupled"  # with the noise of the target's own choice: for pathwise verification
    INDEPENDENT = "independent"  # drawn with noise of its own: for the classic rules


@dataclass(frozen=True)
class Target:
    """What a drafter may know of the model it drafts for when it is loaded."""

    config: ModelConfig
    tokenizer: Tokenizer
    backend: BackendOptions
    loaded: Backend  # it, ready to run; a model that drafts can share its threads
    max_rows: int  # most rows of a pass
    sampling: DraftSampling
    fingerprint: str = ""  # of its weights, see heads/fingerprint.py; empty: unknown
    final_norm: Float32Array | None = None  # [hidden] the weights of its last norm
    mtp: Mapping[str, Tensor] = field(default_factory=dict)  # of its files: see Checkpoint


class DeviceDrafter(Protocol):
    """The side of a drafter that lets passes draft on the device, while the host does not wait for them."""

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        """What passes by this plan draft with; None if they cannot."""
        ...

    def attach(self, requests: Sequence[Request]) -> bool:
        """Whether the device can draft for these requests from now on: all their tokens but the last are
        computed."""
        ...

    def prefill_ahead(self, requests: Sequence[Request]) -> None:
        """A pass over all tokens of these requests has begun, and the device will probably draft for them.

        What `attach` would compute then can be computed behind that pass, while others wait for it.
        """
        ...

    def detach(self, requests: Sequence[Request], unsure: int) -> None:
        """The device has drafted for these requests, up to the tokens that they have now.

        Of the last `unsure` it may have computed guesses only.
        """
        ...


class TextDrafts(DeviceDrafter):
    """Chains from the requests' own texts, found on the device, or drafted optimistically by the host."""

    def __init__(self, look_up: NgramLookup | None = None, optimistic: bool = True) -> None:
        """`optimistic`: the drafter is asked while passes run, and texts are looked up only where that was of
        no help."""
        self.look_up = look_up
        self._optimistic = optimistic

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        from paceline.backends.async_decoding import DeviceDraft  # here: drafters load without a backend

        reach = OPTIMISTIC_PASSES * (1 + plan.levels) if self._optimistic else 0
        return DeviceDraft(plan.levels, look_up=self.look_up, host_tokens=reach)

    def attach(self, requests: Sequence[Request]) -> bool:
        return True

    def prefill_ahead(self, requests: Sequence[Request]) -> None:
        return

    def detach(self, requests: Sequence[Request], unsure: int) -> None:
        return


class Drafter(Protocol):
    """Proposes trees, and learns from what became of every pass, its own or not.

    A drafter derives from this class and overrides what it needs. If a method raises, the requests
    at hand go on with plain decoding, and the drafter is not asked for them again.
    """

    name: str
    needs: DrafterNeeds = DrafterNeeds()
    follows_prefix: bool = False  # whether it can draft behind a plan's prefix; if not, it is not asked then
    least_chance: float = 0.0  # of a path, as it is set: less is not worth a row on this machine
    only_forced: bool = False  # whether all it drafts is forced, so that its budget is for that
    # how it drafts on the device; None: on the host only. Without needs, the host drafts while passes run
    device: DeviceDrafter | None = TextDrafts()

    def bind(self, kv: KVCache) -> None:
        """Called once, before the first request: the place to take a KV pool on the engine's pages."""
        return  # not abstract

    def prepare(self) -> None:
        """Have ready what the first drafts would wait for. Nothing has been added yet."""
        return  # not abstract

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One tree per request, within its plan: budget, branching, depth. May be empty.

        Room for `budget` tokens after the request's own is reserved in its pages, unless it needs none.
        """
        ...

    def backlog(self, request: Request) -> int:
        """How many tokens of a request it would have to compute before it could draft for it."""
        return 0

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        """Take in a pass, after the requests advanced; prefill chunks too, so no position is missed.

        Requests that ended with it hold their pages until all drafters have observed it.
        """
        return  # not abstract

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        return  # not abstract

    def kept(self) -> KeptFeatures | None:
        """What passes leave in its pool by themselves, instead of features that it is shown."""
        return None

    def close(self) -> None:
        """The engine ends: the place to write down what is to survive it."""
        return  # not abstract
