"""The expected outcome of a candidate: a Monte Carlo average over scenarios, each trimmed as a step would be.

Compiled, because a choice evaluates many candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.compiling import compiled
from paceline.control.cost.draft_calls import TERMS


@compiled
def evaluate(
    chances: Any,  # [scenarios, requests, nodes] of drafted nodes; 0: there is no such node
    sizes: Any,  # [drafters, scenarios, requests] nodes that it drafts; -1: it is not asked
    most: Any,  # [drafters] levels that it may draft: a draft that ends earlier has computed one level more
    costs: Any,  # [drafters, TERMS] of its calls
    catch_up: Any,  # [drafters, requests] seconds of catching up, per draft
    pass_seconds: Any,  # [more rows]
    rate: float,  # tokens that a second is worth
) -> tuple[float, float, float]:
    """Means over scenarios: accepted tokens, seconds of the pass and of the drafts, and verified rows."""
    scenarios, requests, nodes = chances.shape
    tokens = seconds = rows = 0.0
    line = np.empty(requests * nodes)  # the chances of a scenario's nodes, descending
    for scenario in range(scenarios):
        count = 0
        for request in range(requests):
            for node in range(nodes):
                chance, place = chances[scenario, request, node], count
                if chance == 0.0:
                    continue
                while place > 0 and line[place - 1] < chance:
                    line[place] = line[place - 1]
                    place -= 1
                line[place] = chance
                count += 1
        # as worth_verifying does
        expected, best_worth, best, best_expected = 0.0, -rate * pass_seconds[0], 0, 0.0
        for node in range(count):
            expected += line[node]
            if expected - rate * pass_seconds[node + 1] > best_worth:
                best_worth = expected - rate * pass_seconds[node + 1]
                best, best_expected = node + 1, expected
        tokens += best_expected
        rows += best
        seconds += pass_seconds[best]
        for drafter in range(len(most)):
            asked, drafted, largest = 0, 0, 0
            for request in range(requests):
                size = sizes[drafter, scenario, request]
                if size >= 0:
                    asked += 1
                    drafted += size
                    largest = max(largest, size)
                    seconds += catch_up[drafter, request]
            if asked:
                call, each, level, node_cost, _ = costs[drafter]
                seconds += call + each * asked + level * min(largest + 1, most[drafter]) + node_cost * drafted
    return tokens / scenarios, seconds / scenarios, rows / scenarios


def prepare() -> None:
    """Compile it now: the first choice would wait for that."""
    one, none = np.zeros((1, 1)), np.zeros((1, 1, 1))
    evaluate(none, none.astype(np.int64), np.ones(1, np.int64), np.zeros((1, TERMS)), one, np.ones(2), 1.0)
