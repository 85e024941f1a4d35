"""What an offer gives: each scene is decided as a step would be. Compiled: a choice tries many offers."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.compiling import compiled
from paceline.control.draft_cost import TERMS


@compiled
def outcome(
    chances: Any,  # [scenes, requests, nodes] of what is drafted; 0: there is no such node
    sizes: Any,  # [drafters, scenes, requests] nodes that it drafts; -1: it is not asked
    most: Any,  # [drafters] levels that it may draft: where a draft is shorter, one more was looked at
    prices: Any,  # [drafters, TERMS] of its calls
    late: Any,  # [drafters, requests] seconds that a draft takes more, because there is much to catch up with
    spent: Any,  # [more rows] seconds of passes
    rate: float,  # tokens that a second is worth
) -> tuple[float, float, float]:
    """Tokens more than without drafts, seconds of the pass and of the drafts, and rows more, on average."""
    scenes, requests, nodes = chances.shape
    tokens = seconds = rows = 0.0
    line = np.empty(requests * nodes)  # the nodes of a scene, the likeliest first
    for scene in range(scenes):
        count = 0
        for request in range(requests):
            for node in range(nodes):
                chance, place = chances[scene, request, node], count
                if chance == 0.0:
                    continue
                while place > 0 and line[place - 1] < chance:
                    line[place] = line[place - 1]
                    place -= 1
                line[place] = chance
                count += 1
        worth, best_worth, best, brought = 0.0, -rate * spent[0], 0, 0.0
        for node in range(count):
            worth += line[node]
            if worth - rate * spent[node + 1] > best_worth:
                best_worth, best, brought = worth - rate * spent[node + 1], node + 1, worth
        tokens += brought
        rows += best
        seconds += spent[best]
        for drafter in range(len(most)):
            asked, drafted, largest = 0, 0, 0
            for request in range(requests):
                size = sizes[drafter, scene, request]
                if size >= 0:
                    asked += 1
                    drafted += size
                    largest = max(largest, size)
                    seconds += late[drafter, request]
            if asked:
                call, each, level, node_price, _ = prices[drafter]
                seconds += (
                    call + each * asked + level * min(largest + 1, most[drafter]) + node_price * drafted
                )
    return tokens / scenes, seconds / scenes, rows / scenes


def prepare() -> None:
    """Have it compiled: the first choice would wait for that."""
    one, none = np.zeros((1, 1)), np.zeros((1, 1, 1))
    outcome(none, none.astype(np.int64), np.ones(1, np.int64), np.zeros((1, TERMS)), one, np.ones(2), 1.0)
