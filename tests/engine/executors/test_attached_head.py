"""A head that drafts on the device is attached to requests when none of their passes is in flight."""

from __future__ import annotations

from paceline.control.controller import FixedController
from paceline.core.trees import DraftPlan
from paceline.draft.base import UnboundDrafter
from tests.engine.mixed_requests import REQUESTS, Changing, expected, outcome
from tests.toy import ToyBackend, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

TRUTH = {tuple(ids): expected(number)[0] for number, (ids, _) in enumerate(REQUESTS)}
ADDED = (2, 9)  # of the REQUESTS


def engine_of(drafter, controller):
    """An engine with two requests, and all requests that the drafter's head was attached to."""
    engine = toy_engine(ToyBackend(on_device=True), drafter=drafter, controller=controller)
    attach, attached = drafter.attach, []

    def checked(requests):
        attached.extend(requests)
        assert not any(engine._device._joined.get(request) for request in requests), "in flight"
        return attach(requests)

    drafter.attach = checked
    return engine, [engine.add_request(*REQUESTS[number])[0] for number in ADDED], attached


def check(added):
    assert [outcome(request) for request in added] == [expected(number) for number in ADDED]
    assert not any(request.failed_drafters for request in added)


def test_a_head_is_attached_only_to_requests_without_a_pass_in_flight():
    """Between plain passes and its chains the pipeline drains, whatever drafted before."""
    engine, added, attached = engine_of(ScriptedDrafter(TRUTH, "partly"), Changing([3, 0], 3))
    drain(engine)
    assert len(attached) > len(added)  # again after plain passes
    check(added)


def test_a_head_that_is_replaced_is_attached_again_to_all_requests_when_no_pass_is_in_flight():
    """So its keys and values of all their tokens are computed again, and no token changes."""

    class Replaced(ScriptedDrafter):
        kept_features = None

        def prepare(self):
            return

        def replace(self, head):
            self.attached.clear()  # as its keys and values are void

    drafter = Replaced(TRUTH, "partly")
    drafter.head, other = drafter, UnboundDrafter("scripted", lambda kv: drafter)
    engine, added, attached = engine_of(drafter, FixedController(DraftPlan("scripted", 3)))
    while engine.has_unfinished:
        engine.step()
        engine.step()
        engine.replace_head("scripted", other)
    assert all(attached.count(request) >= 2 for request in added)  # and not only at the start
    check(added)
