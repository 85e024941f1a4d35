"""DevicePlans: what is chosen where a plan has no buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.backends.async_decoding import DeviceDraft
from paceline.core.schedule import Scheduled
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.executors import device_plans
from paceline.engine.executors.device_executor import DeviceExecutor
from paceline.engine.executors.device_plans import DevicePlans

TREE = DraftPlan("head", 9, branching=3)
REQUESTS = 200  # more than a pass with trees of 9 nodes has buffers for


class Decoder:
    supported_sampling = 0
    supports_lookup = True

    def has_room(self, draft: DeviceDraft) -> bool:
        return True


class Drafts:
    """Drafts anything on the device."""

    def draft(self, plan: DraftPlan) -> DeviceDraft:
        return DeviceDraft(plan.levels, nodes=plan.nodes if plan.branching > 1 else 0)

    forced_plan = DraftPlan("grammar", 7)

    def only_forced(self, plan: DraftPlan) -> bool:
        return plan.drafter == "grammar"

    def num_forced(self, request: object) -> int:
        return 5

    @property
    def on_device(self) -> Drafts:
        return self


@pytest.mark.parametrize("plans", [1, 2])
def test_a_tree_without_buffers_becomes_a_chain_only_if_the_chain_has_some(
    plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_plans, "MAX_DRAFTS", plans)
    plans_of_device = DevicePlans(Decoder(), Drafts())  # type: ignore[arg-type]
    assert plans_of_device.offers(TREE)
    assert plans_of_device.fitting(TREE, 1) == TREE
    assert plans_of_device.fitting(TREE, REQUESTS) == (TREE.as_chain() if plans > 1 else PLAIN)


class Constrained:
    sampling = SimpleNamespace(constraint=object())


def test_forced_tokens_that_a_pass_in_flight_samples_are_not_drafted_again() -> None:
    executor = DeviceExecutor(Decoder, Drafts(), None, 1)  # type: ignore[arg-type]
    request: Any = Constrained()
    plan = executor.forced_plan([request])
    assert plan.budget == 7
    executor._passes.append(([Scheduled(request, 1, PLAIN)], PLAIN))
    assert executor.forced_plan([request]) == plan  # 4 of 5 are left
    executor._passes[0] = [Scheduled(request, 1, plan)], plan
    assert executor.forced_plan([request]) == PLAIN
