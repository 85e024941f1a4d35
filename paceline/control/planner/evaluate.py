"""The expected outcome of a candidate: a Monte Carlo average over scenarios, each trimmed as a step would be.

Compiled, because a choice evaluates many candidates. Everywhere `chances` are [scenarios, requests, nodes] of
drafted nodes; 0: there is no such node.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.compiling import compiled
from paceline.control.cost.draft_calls import TERMS


@compiled
def evaluate(
    chances: Any,  # [scenarios, requests, nodes]
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


@compiled
def evaluate_lengths(
    chances: Any, lengths: Any, levels: int, costs: Any, catch_up: Any, pass_seconds: Any, rate: float
) -> Any:
    """[lengths, 3] outcomes of one drafter for all requests, whose drafts have at most each of these lengths.

    `costs` [1, TERMS] and `catch_up` [1, requests] are the drafter's, the rest is as in `evaluate`.
    """
    outcomes, most = np.empty((len(lengths), 3)), np.empty(1, np.int64)
    for place, length in enumerate(lengths):
        drafted = likely_nodes(chances, 0.0, length)
        most[0] = min(length, levels)
        outcome = evaluate(drafted, count_nodes(drafted), most, costs, catch_up, pass_seconds, rate)
        outcomes[place, 0], outcomes[place, 1], outcomes[place, 2] = outcome
    return outcomes


@compiled
def best_rate(pass_seconds: Any, requests: int, chance: float, tokens: float, per_token: float) -> float:
    """The most tokens per second with any number of more rows, if every drafted token has this chance.

    `tokens` are those of plain decoding. A token takes `per_token` seconds beside its pass.
    """
    best = 0.0
    for row in range(len(pass_seconds)):
        best = max(best, tokens / (pass_seconds[row] + per_token * tokens))
        tokens += chance ** (1 + row // requests)
    return best


@compiled
def count_nodes(chances: Any) -> Any:
    """[1, scenarios, requests] the number of nodes of each draft."""
    scenarios, requests, nodes = chances.shape
    sizes = np.zeros((1, scenarios, requests), np.int64)
    for scenario in range(scenarios):
        for request in range(requests):
            for node in range(nodes):
                sizes[0, scenario, request] += chances[scenario, request, node] > 0.0
    return sizes


@compiled
def worth_above(chances: Any, row: float) -> tuple[Any, Any]:
    """Means over scenarios, [requests]: the tokens that a draft is worth after its rows are paid, each of
    which costs `row`, and its nodes."""
    scenarios, requests, nodes = chances.shape
    worth, sizes = np.zeros(requests), np.zeros(requests)
    for scenario in range(scenarios):
        for request in range(requests):
            for node in range(nodes):
                worth[request] += max(chances[scenario, request, node] - row, 0.0)
                sizes[request] += chances[scenario, request, node] > 0.0
    return worth / scenarios, sizes / scenarios


@compiled
def likely_nodes(chances: Any, least: float, length: int) -> Any:
    """[scenarios, requests, nodes] the chances of at most `length` nodes, 0 for those below `least`."""
    scenarios, requests, nodes = chances.shape
    likely = np.zeros((scenarios, requests, min(length, nodes)))
    for scenario in range(scenarios):
        for request in range(requests):
            for node in range(likely.shape[2]):
                if chances[scenario, request, node] >= least:
                    likely[scenario, request, node] = chances[scenario, request, node]
    return likely


@compiled
def play_cascade(one: Any, other: Any, row: float, enough: Any) -> tuple[Any, Any]:
    """The drafts of a cascade: chances as in `evaluate`, and the sizes of the drafts of both drafters.

    The second drafter is asked where the first one's draft is worth less than `enough` [requests].
    """
    scenarios, requests, _ = one.shape
    chances = np.zeros((scenarios, requests, max(one.shape[2], other.shape[2])))
    sizes = np.zeros((2, scenarios, requests), np.int64)
    for scenario in range(scenarios):
        for request in range(requests):
            worth = 0.0
            for chance in one[scenario, request]:
                worth += max(chance - row, 0.0)
                sizes[0, scenario, request] += chance > 0.0
            is_asked = worth < enough[request]
            drafted = other[scenario, request] if is_asked else one[scenario, request]
            for node, chance in enumerate(drafted):
                chances[scenario, request, node] = chance
                sizes[1, scenario, request] += is_asked and chance > 0.0
            if not is_asked:
                sizes[1, scenario, request] = -1
    return chances, sizes


def prepare() -> None:
    """Compile them now: the first choice would wait for that."""
    one, none, spent = np.zeros((1, 1)), np.zeros((1, 1, 1)), np.ones(2)
    evaluate(none, none.astype(np.int64), np.ones(1, np.int64), np.zeros((1, TERMS)), one, spent, 1.0)
    evaluate_lengths(none, np.ones(1, np.int64), 1, np.zeros((1, TERMS)), one, spent, 1.0)
    worth_above(likely_nodes(none, 0.0, 1), 0.0)
    play_cascade(none, none, 0.0, one[0])
    best_rate(spent, 1, 1.0, 1.0, 0.0)
