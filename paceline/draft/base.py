"""The drafter protocol: propose draft trees, observe what became of them, declare what is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.features import Features
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.errors import ConfigError
from paceline.options import refuse_unknown

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


# An optimistic draft covers the pass in flight, the one after it, and two more, because with many requests it
# takes some passes until each is drafted for again.
OPTIMISTIC_PASSES = 4  # passes, at most


@dataclass(frozen=True)
class DrafterNeeds:
    """What a drafter needs from the engine, declared as data."""

    feature_layers: tuple[int, ...] = ()  # hidden states it reads: 0 is the embedding, i is after layer i - 1
    bytes_per_page: int = 0  # of its own keys and values, beside each page of the target
    target_pages: bool = False  # it writes drafted rows to the target's pages: no pass may be in flight then


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


class DeviceDrafter(Protocol):
    """The device side of a drafter: it drafts in passes that the host does not wait for."""

    attaches: bool = True  # it must compute a request's tokens before it can draft for it
    drafts_on_host: bool = False  # the host drafts while passes run
    drafts_trees: bool = False  # of a fixed shape; otherwise chains only

    @property
    def catch_up_seconds(self) -> float | None:
        """Seconds of computing one token of a prompt, measured at start-up; None: not measured."""
        return None

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        """How device passes draft by this plan; None if they cannot."""
        ...

    def attach(self, requests: Sequence[Request]) -> bool:
        """Whether the device can draft for these requests from now on. Computes the drafter's keys and values
        of all their tokens but the last."""
        ...

    def prefill_ahead(self, requests: Sequence[Request]) -> None:
        """Queue what `attach` would compute for these requests after the pass that now prefills them.

        Called when that pass has begun and the device will probably draft for them.
        """
        ...

    def detach(self, requests: Sequence[Request], unsure: int) -> None:
        """Return these requests to the host: the device has drafted for them up to their current tokens.

        The keys and values of the last `unsure` tokens may be those of rejected guesses.
        """
        ...


class TextDrafts(DeviceDrafter):
    """Chains from the requests' own texts: prompt lookup on the device, or optimistic host drafts."""

    attaches = False

    def __init__(self, look_up: NgramLookup | None = None, optimistic: bool = True) -> None:
        """`optimistic`: the host drafts while passes run, and the device looks up only where its draft does
        not match the sampled tokens."""
        self.look_up = look_up
        self.drafts_on_host = optimistic

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        from paceline.backends.async_decoding import DeviceDraft  # here: drafters load without a backend

        if plan.branching > 1:
            return None
        reach = OPTIMISTIC_PASSES * (1 + plan.levels) if self.drafts_on_host else 0
        return DeviceDraft(plan.levels, look_up=self.look_up, host_tokens=reach)

    def attach(self, requests: Sequence[Request]) -> bool:
        return True

    def prefill_ahead(self, requests: Sequence[Request]) -> None:
        return

    def detach(self, requests: Sequence[Request], unsure: int) -> None:
        return


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class NoOptions:
    """The options of a drafter that has none of its own."""


UNBOUND: Any = None  # of an attribute that `Drafter.bind` sets, before any use


class Drafter(Protocol):
    """Proposes draft trees and observes every pass, also those with drafts of other drafters.

    Derive from this class and override what is needed. If a method raises, its requests continue with plain
    decoding, and the drafter is not asked for them again.
    """

    name: str
    Options: ClassVar[type[Any]] = (
        NoOptions  # a frozen dataclass: the method's own keys of speculative_config
    )
    needs: DrafterNeeds = DrafterNeeds()
    follows_prefix: bool = (
        False  # can draft after a plan's prefix; if not, it is not asked where there is one
    )
    draft_ids: Int32Array | None = None  # [tokens] the target's ids that it can draft; None: all
    least_chance: float = 0.0  # paths with a lower chance are not drafted: not worth a row on this machine
    only_forced: bool = False  # drafts forced tokens only, so its whole budget is for them
    # how it drafts on the device; None: on the host only. Without needs, the host drafts while passes run
    device: DeviceDrafter | None = TextDrafts()

    @classmethod
    def load(cls, options: Any, target: Target) -> Drafter:
        """The drafter, ready for `bind`: made without arguments, or from `options` if it has its own."""
        make: Any = cls  # its constructor is the subclass's
        drafter: Drafter = make() if cls.Options is NoOptions else make(options)
        return drafter

    def bind(self, kv: KVCache) -> None:
        """Called once, before the first request: the place to add a KV pool to the engine's pages."""
        return  # not abstract

    def prepare(self) -> None:
        """Warm up: compile and allocate what the first drafts would wait for. Called before any request."""
        return  # not abstract

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One tree per request, within its plan: budget, branching, depth. May be empty.

        The request's pages have room for `budget` more tokens, unless the drafter needs none.
        """
        ...

    def backlog(self, request: Request) -> int:
        """The number of tokens that it must compute before it can draft for a request."""
        return 0

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

    def remember(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Learn a past response: an answer to a request without a salt, from before the engine's start."""
        return  # not abstract

    def replace_head(self, other: Drafter) -> None:
        """Draft with the head of `other` from now on; called between steps, while requests run.

        `other` is an unbound drafter of the same method, which this one takes over. If its head does not fit,
        ConfigError, and nothing has changed.
        """
        raise ConfigError(
            f"the method {self.name} has no head that can be replaced while requests run. Use eagle3, eagle, "
            "dflash or dspark, or restart with the other head."
        )

    def kept(self) -> KeptFeatures | None:
        """The features that passes write to its pool; None: it reads them in `observe`."""
        return None

    def close(self) -> None:
        """Called when the engine ends: the place to save what must survive it."""
        return  # not abstract


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
        and (
            drafter.device.attaches
            or not (host_features or drafter.only_forced or drafter.needs != DrafterNeeds())
        )
    }
