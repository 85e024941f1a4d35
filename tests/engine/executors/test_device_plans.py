"""DevicePlans: what is chosen where a plan has no buffers."""

from __future__ import annotations

import pytest

from paceline.backends.async_decoding import DeviceDraft
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.executors import device_plans
from paceline.engine.executors.device_plans import DevicePlans

TREE = DraftPlan("head", 9, branching=3)
REQUESTS = 200  # more than a pass with trees of 9 nodes has buffers for


class Decoder:
    supported_sampling = 0
    supports_lookup = True


class Drafts:
    """Drafts anything on the device."""

    def device_draft(self, plan: DraftPlan) -> DeviceDraft:
        return DeviceDraft(plan.levels, nodes=plan.nodes if plan.branching > 1 else 0)

    def only_forced(self, plan: DraftPlan) -> bool:
        return False


@pytest.mark.parametrize("plans", [1, 2])
def test_a_tree_without_buffers_becomes_a_chain_only_if_the_chain_has_some(
    plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_plans, "MAX_DRAFTS", plans)
    plans_of_device = DevicePlans(Decoder(), Drafts())  # type: ignore[arg-type]
    assert plans_of_device.offers(TREE)
    assert plans_of_device.fitting(TREE, 1) == TREE
    assert plans_of_device.fitting(TREE, REQUESTS) == (TREE.as_chain() if plans > 1 else PLAIN)
