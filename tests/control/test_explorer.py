"""The explorer's budget of time."""

from paceline.control.config import CONFIG
from paceline.control.explorer import Explorer, Probe

MOST = int(CONFIG.explorer.max_saved)  # steps' time


def test_no_more_is_saved_up_than_an_expensive_draft_costs() -> None:
    """Time earned where drafts pay would be spent at once on requests for which they do not."""
    explorer, seconds = Explorer(["head"], plain=0.0), 0.01
    for _ in range(100_000):
        explorer.budget.earn(seconds)
    rate = 100.0
    costs = {
        steps: Probe(("1", 0), 0, "head", 4, steps * seconds * rate, rate) for steps in (MOST - 1, MOST + 1)
    }
    assert explorer.can_afford(costs[MOST - 1])
    assert not explorer.can_afford(costs[MOST + 1])
    assert MOST < 20
