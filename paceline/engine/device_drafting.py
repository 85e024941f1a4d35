"""DeviceDrafting: how the engine's drafters draft on the device, and the heads that are attached there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.backends.async_decoding import DeviceDraft
from paceline.core.request import Request
from paceline.core.trees import DraftPlan
from paceline.draft.base import Drafter, drafts_on_device
from paceline.draft.device import DeviceDrafter
from paceline.engine.drafter_faults import DrafterFaults

# Tokens of a match from which on a device pass prefers the looked-up tokens to a head's chain. After shorter
# matches the head is right more often (docs/lab/2026-11-19-auto-on-gpu.md, "What a lookup is worth beside a
# head").
MIN_MATCH_BESIDE_HEAD = 8


class DeviceDrafting:
    """The device sides of the engine's drafters."""

    def __init__(self, drafters: Mapping[str, Drafter], faults: DrafterFaults) -> None:
        self._drafters = drafts_on_device(drafters)
        self._faults = faults

    def draft(self, plan: DraftPlan) -> DeviceDraft | None:
        """How device passes draft by this plan; None if they cannot.

        A cascade is a lookup, and a head where nothing is found. The head computes accepted tokens again, so
        it does not matter which of the two has drafted them. If the head drafts trees, a lookup replaces
        their first path.
        """
        # only the host truncates drafts by their estimated acceptance
        if plan.forced or plan.least_chance:
            return None
        drafter = self._drafters.get(plan.drafter or "")
        if plan.otherwise is None or drafter is None:
            return None if drafter is None else drafter.device_draft(plan)
        draft, head = drafter.device_draft(replace(plan, branching=1)), self.draft(plan.second())
        look_up = None if draft is None else draft.look_up
        if head is None or head.runner is None or look_up is None or draft is None or draft.host_tokens:
            return None
        if head.branching != plan.branching or (head.nodes and head.length < plan.levels):
            return None
        shortest = min(max(look_up.shortest, MIN_MATCH_BESIDE_HEAD), look_up.longest)
        found = replace(look_up, shortest=shortest)
        return replace(head, length=plan.levels, network_length=head.length, look_up=found)

    def head_of(self, plan: DraftPlan) -> str | None:
        """The drafter of this plan, or of its `otherwise`, that must be attached; None if there is none."""
        drafter = self._drafters.get(plan.drafter or "")
        if drafter is not None and drafter.attaches:
            return plan.drafter
        return None if plan.otherwise is None else self.head_of(plan.otherwise)

    def catch_up_seconds(self, plan: DraftPlan) -> float | None:
        """Seconds per token until the plan's head can draft on the device; None: not measured."""
        head = self.head_of(plan)
        return None if head is None else self._drafters[head].catch_up_seconds

    def prefill_ahead(self, plan: DraftPlan, requests: Sequence[Request]) -> None:
        """Let the plan's head prefill these requests after the pass that prefills them now."""
        with self._faults.isolated(self.head_of(plan) or "", requests):
            self._head(plan).prefill_ahead(requests)

    def attach(self, plan: DraftPlan, requests: Sequence[Request]) -> bool:
        """Whether the device can draft for these requests from now on."""
        with self._faults.isolated(self.head_of(plan) or "", requests):
            if self._head(plan).attach(requests):
                return True
        return False

    def detach(self, plan: DraftPlan, requests: Sequence[Request]) -> None:
        """Return these requests from the device to the host."""
        with self._faults.isolated(self.head_of(plan) or "", requests):
            self._head(plan).detach(requests, unsure=1 + plan.levels)

    def _head(self, plan: DraftPlan) -> DeviceDrafter:
        head = self.head_of(plan)
        assert head is not None, "only heads are attached"
        return self._drafters[head]
