"""Passes that are given what a drafter of the host makes between them."""

from __future__ import annotations

from paceline.draft.trees import PLAIN
from paceline.engine.ahead import LOOKED_UP
from tests.engine.test_ahead import REQUESTS, Hosted, expected, outcome, params
from tests.engine.test_exactness import prompt
from tests.toy import ToyBackend, drain, toy_engine


def test_a_drafter_of_the_host_gives_the_next_pass_what_it_makes_of_the_last():
    number = 2
    drafter = Hosted({tuple(REQUESTS[number][0]): expected(number)[0]}, "right")
    backend = ToyBackend(ahead=True)
    engine = toy_engine(backend, drafter=drafter, budget=3, branching=1)
    (request,) = engine.add_request(*REQUESTS[number])
    drain(engine)
    assert outcome(request) == expected(number)
    counts = request.speculative
    assert counts.num_accepted_draft_tokens == counts.num_draft_tokens > 0  # it is always right
    assert backend.num_launched == -(-(request.num_output - 1) // 4)


class Silent(Hosted):
    """Finds something to draft behind some tokens only."""

    def propose(self, requests, plans):
        silent = [
            plan if len(request.token_ids) % 8 > 4 else PLAIN
            for request, plan in zip(requests, plans, strict=True)
        ]
        return super().propose(requests, silent)


def test_while_a_drafter_of_the_host_finds_nothing_passes_are_plain_and_run_ahead():
    number = 2
    drafter = Silent({tuple(REQUESTS[number][0]): expected(number)[0]}, "right")
    backend = ToyBackend(ahead=True)
    engine = toy_engine(backend, drafter=drafter, budget=3, branching=1)
    (request,) = engine.add_request(*REQUESTS[number])
    in_flight = []
    while engine.has_unfinished:
        engine.step()
        in_flight.append(len(engine._ahead._flight))
    assert outcome(request) == expected(number)
    assert request.speculative.num_accepted_draft_tokens > 0
    assert {0, 1} <= set(in_flight)  # behind plain passes there is another one


def test_with_many_requests_a_drafter_of_the_host_that_finds_nothing_is_not_asked_before_every_pass():
    asked = []

    class Lost(Hosted):
        def propose(self, requests, plans):
            asked.append(len(requests))
            return super().propose(requests, [PLAIN] * len(plans))

    backend = ToyBackend(ahead=True)
    drafter = Lost({tuple(prompt(number, 5)): [] for number in range(2 * LOOKED_UP)}, "right")
    engine = toy_engine(backend, drafter=drafter, budget=3, branching=1, max_num_seqs=2 * LOOKED_UP)
    for number in range(2 * LOOKED_UP):
        engine.add_request(prompt(number, 5), params(number, max_tokens=14, ignore_eos=True))
    drain(engine)
    together = [count for count in asked if count == 2 * LOOKED_UP]
    assert len(together) <= 1 + 14 / 3
