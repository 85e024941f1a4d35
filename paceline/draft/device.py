"""The device side of a drafter: how it drafts in passes that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from paceline.core.trees import DraftPlan

if TYPE_CHECKING:
    from paceline.backends.async_decoding import DeviceDraft, NgramLookup
    from paceline.core.request import Request

# An optimistic draft covers the pass in flight, the one after it, and two more, because with many requests it
# takes some passes until each is drafted for again.
OPTIMISTIC_PASSES = 4  # passes, at most


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
