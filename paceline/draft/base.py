"""The drafter protocol: propose draft trees, observe what became of them, declare what is needed.

What only some drafters have is a component with a small protocol of its own, which the drafter declares by an
attribute: the device side (device.py), keys and values, a replaceable head, a memory of past responses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.features import Features
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.device import DeviceDrafter, TextDrafts
from paceline.errors import ConfigError
from paceline.options import refuse_unknown

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.backends.options import BackendOptions
    from paceline.core.forward import KeptFeatures
    from paceline.core.request import Request
    from paceline.core.verdict import Verdict
    from paceline.kv.cache import KVCache
    from paceline.models.checkpoint import Tensor
    from paceline.models.config import ModelConfig
    from paceline.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class DrafterNeeds:
    """What a drafter needs from the engine."""

    feature_layers: tuple[int, ...] = ()  # hidden states it reads: 0 is the embedding, i is after layer i - 1
    bytes_per_page: int = 0  # of its own keys and values, beside each page of the target
    target_pages: bool = False  # it writes drafted rows to the target's pages: no pass may be in flight then


class Drafter(Protocol):
    """Proposes draft trees and observes every pass, also those with drafts of other drafters.

    Derive from this class, define `propose`, and declare what else it needs and can do. If a method raises,
    its requests continue with plain decoding, and the drafter is not asked for them again.
    """

    name: str
    needs: DrafterNeeds = DrafterNeeds()
    follows_prefix: bool = False  # can draft after a plan's prefix; else it is not asked where there is one
    only_forced: bool = False  # drafts forced tokens only, so its whole budget is for them
    draft_ids: Int32Array | None = None  # [tokens] the target's ids that it can draft; None: all
    # how it drafts on the device; None: on the host only. Without needs, the host drafts while passes run
    device: DeviceDrafter | None = TextDrafts()
    kv: DraftKV | None = None  # keys and values that it computes itself
    head: DraftHead | None = None  # a head that can be replaced
    memory: ResponseMemory | None = None  # past responses that it drafts from

    @abstractmethod
    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One tree per request, within its plan: budget, branching, depth. May be empty.

        The request's pages have room for `budget` more tokens, unless the drafter needs none.
        """

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        """Learn from a pass, after its requests advanced. Prefill chunks too, so no position is missed.

        Requests that ended with the pass hold their pages until all drafters have observed it.
        """
        return  # not abstract

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        return  # not abstract


class DraftKV(Protocol):
    """The keys and values that a drafter computes itself."""

    def backlog(self, request: Request) -> int:
        """The number of tokens to compute before the drafter can draft for a request."""
        ...


class DraftHead(Protocol):
    """A learned head that passes write features for, and that can be replaced."""

    @property
    def kept_features(self) -> KeptFeatures | None:
        """The features that passes write to its pool; None: the drafter reads them in `observe`."""
        ...

    def prepare(self) -> None:
        """Warm up: compile and allocate what the first drafts would wait for. Called before any request."""
        ...

    def replace(self, head: Any) -> None:
        """Draft with this head from now on, the `UnboundDrafter.head` of another drafter of the same method.

        Called between steps, while requests run. If it does not fit, ConfigError, and nothing has changed.
        """
        ...


class ResponseMemory(Protocol):
    """The past responses that a drafter drafts from."""

    def remember(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Learn a past response: an answer to a request without a salt, from before the engine's start."""
        ...

    def save(self) -> None:
        """Write what must survive the engine. Called when it ends."""
        ...


class DraftSampling(Enum):
    """How a drafter turns its distribution into tokens. At temperature 0 it is always GREEDY."""

    GREEDY = "greedy"  # the likeliest token
    COUPLED = "coupled"  # sampled with the noise that the target will use: for pathwise verification
    INDEPENDENT = "independent"  # sampled with noise of its own: for rejection sampling


@dataclass(frozen=True)
class Target:
    """The target model, as a drafter sees it when it is loaded."""

    config: ModelConfig
    tokenizer: Tokenizer
    backend: BackendOptions
    loaded: Backend  # the target, ready to run; a draft model can share its threads
    max_rows: int  # of a pass
    sampling: DraftSampling
    fingerprint: str = ""  # of its weights, see heads/fingerprint.py; empty: unknown
    final_norm: Float32Array | None = None  # [hidden] weights of its last norm
    mtp: Mapping[str, Tensor] = field(default_factory=dict)  # its MTP block, see Checkpoint


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class NoOptions:
    """The options of a drafter that has none of its own."""


@dataclass(frozen=True)
class UnboundDrafter:
    """A loaded drafter, before there is a KV cache, whose size depends on what its drafters need."""

    name: str
    bind: Callable[[KVCache], Drafter]  # the drafter; called once, so it may add a pool to the cache
    bytes_per_page: int = 0  # as its DrafterNeeds will say
    head: object = None  # what `DraftHead.replace` takes; None: it has no such head


def drafts_on_device(drafters: Mapping[str, Drafter]) -> dict[str, DeviceDrafter]:
    """The device side of each drafter that has one there.

    Drafts from texts are made by the host while passes run. So their drafter needs nothing else, and none of
    the drafters needs features on the host: those of passes on the device stay there.
    """
    host_features = any(drafter.needs.feature_layers for drafter in drafters.values())
    return {
        name: drafter.device
        for name, drafter in drafters.items()
        if drafter.device is not None
        and (drafter.device.attaches or not (host_features or drafter.needs != DrafterNeeds()))
    }
