"""AttachedHead: the head (or draft model) that drafts on the device, and the requests it drafts for there.

While requests are attached, the head's keys and values of new tokens are computed on the device, in the order
of passes. So one head is attached at a time, and its requests are detached before the host drafts for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.request import Request
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.device_drafting import DeviceDrafting


class AttachedHead:
    """The head in use on the device, if any, and its requests."""

    def __init__(self, drafting: DeviceDrafting) -> None:
        self._drafting = drafting
        self._requests: dict[Request, None] = {}
        self._plan = PLAIN  # of the head

    def is_head_of(self, plan: DraftPlan) -> bool:
        """Whether this plan drafts with it; also if there is no head and the plan needs none."""
        return plan is self._plan or self._drafting.head_of(self._plan) == self._drafting.head_of(plan)

    def attach(self, requests: Sequence[Request], plan: DraftPlan) -> bool:
        """Whether the plan's head drafts for all of these requests on the device now."""
        new = [request for request in requests if request not in self._requests and not request.undrafted]
        if new and not self._drafting.attach(plan, new):
            return False
        self._requests.update(dict.fromkeys(new))
        self._plan = plan
        return True

    def prefill_ahead(self, requests: Sequence[Request], plan: DraftPlan) -> None:
        """Let the plan's head prefill these requests after the pass that ends their prefill."""
        if requests:
            self._drafting.prefill_ahead(plan, requests)

    def detach(self) -> None:
        """Return the requests to the host."""
        if self._requests:
            left = [request for request in self._requests if not request.finished]
            self._drafting.detach(self._plan, left)
            self._requests.clear()
        self._plan = PLAIN

    def forget_finished(self) -> None:
        """Drop the requests that have ended."""
        self._requests = {request: None for request in self._requests if not request.finished}

    def drop(self) -> None:
        """Forget all requests: a pass failed, or the keys and values of the head are void."""
        self._requests.clear()
        self._plan = PLAIN
