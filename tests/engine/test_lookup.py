"""Prompt lookup on the device: the drafts of the host, in passes that overlap."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from paceline.backends.async_decoding import DeviceDraft
from paceline.control.controller import Controller, StepPlan
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DrafterNeeds
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.engine.drafting import Drafting
from paceline.engine.executors import device_plans
from tests.engine.mixed_requests import params
from tests.engine.test_exactness import prompt
from tests.toy import VOCAB, ToyBackend, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter
from tests.toy_logits import hashed_logits

LENGTH = 5


class Repeating(ToyBackend):
    """Continues by the position alone, so texts repeat; one token in eleven depends on all before it."""

    def logits_of(self, tokens, positions):
        if positions[-1] % 11 == 0:
            return super().logits_of(tokens, positions)
        return hashed_logits((positions[-1:] % 7).tobytes(), self.vocab)


def add_requests(engine, count=5):
    added = []
    for number in range(count):
        own = {"max_tokens": 30 + 3 * number, "ignore_eos": True, "temperature": 0.9 if number == 1 else 0.0}
        if number == 3:
            own["speculative"] = "off"
        added.append(engine.add_request(prompt(number, 4 + number), params(number, **own))[0])
    return added


def results(backend, count=5, drafts=True, **options):
    """Tokens and counts of some requests, one of which wants no drafts, and the engine."""
    drafter = NgramDrafter(NgramDrafter.Options()) if drafts else None
    engine = toy_engine(backend, drafter=drafter, budget=LENGTH, branching=1, **options)
    added = add_requests(engine, count)
    drain(engine)
    outputs = [request.output_token_ids for request in added]
    counts = [request.speculative for request in added]
    return outputs, [
        (own.num_spec_steps, own.num_draft_tokens, own.num_accepted_draft_tokens) for own in counts
    ]


def test_lookup_gives_the_tokens_of_off_and_the_drafts_of_the_host():
    plain, nothing = results(Repeating(), drafts=False)
    by_host, host_counts = results(Repeating())  # step by step
    backend = Repeating(on_device=True)
    looked_up, counts = results(backend)
    assert looked_up == by_host == plain
    assert counts == host_counts
    assert counts[3] == nothing[3] == (0, 0, 0)
    assert all(counts[number][2] > 10 for number in (0, 2, 4))
    assert backend.num_launched < 40  # of up to 41 tokens


def test_a_pass_is_launched_before_the_last_is_read():
    engine = toy_engine(
        Repeating(on_device=True),
        drafter=NgramDrafter(NgramDrafter.Options()),
        budget=LENGTH,
        branching=1,
    )
    (request,) = engine.add_request(prompt(2, 5), params(2, max_tokens=60, ignore_eos=True))
    in_flight = []
    while engine.has_unfinished:
        engine.step()
        in_flight.append(len(engine._pipeline))
    assert request.speculative.num_accepted_draft_tokens > 20
    assert in_flight[1:-3] == [1] * len(in_flight[1:-3])  # another one, behind the one that was read


def test_the_host_drafts_where_the_decoder_has_no_lookup():
    plain, _ = results(Repeating(), drafts=False)
    by_host, counts = results(Repeating(on_device=True, supports_lookup=False))
    assert by_host == plain
    assert counts[0][2] > 10


def test_with_too_many_requests_for_the_buffers_passes_are_plain(monkeypatch):
    plain, _ = results(Repeating(), drafts=False)
    few, some_counts = results(Repeating(on_device=True))
    monkeypatch.setattr(device_plans, "MAX_DRAFT_ROWS", 3 * (1 + LENGTH))
    looked_up, counts = results(Repeating(on_device=True))
    assert looked_up == few == plain
    accepted, all_accepted = (sum(own[2] for own in counts) for counts in (counts, some_counts))
    assert 0 < accepted < all_accepted  # some when others have ended


TURNS = (PLAIN, DraftPlan("ngram", LENGTH))


class Alternating(Controller):
    """Alternates between two kinds of passes."""

    def __init__(self, turns, plans=TURNS):
        self.turns, self.plans, self.step = turns, plans, 0

    def plan(self, running, load):
        self.step += 1
        plan = self.plans[self.turns[self.step % len(self.turns)]]
        return StepPlan([plan if request.plan is None else request.plan for request in running])


RANDOM = np.random.default_rng(0).integers(0, 2, 1000).tolist()


@pytest.mark.parametrize("turns", [[0, 1], [0] * 3 + [1] * 3, [0] * 8 + [1] * 8, RANDOM])
def test_plain_passes_and_passes_with_lookup_can_alternate(turns):
    plain, _ = results(Repeating(), drafts=False)
    looked_up, counts = results(Repeating(on_device=True), controller=Alternating(turns))
    assert looked_up == plain
    assert counts[0][2] > 5


class Head(ScriptedDrafter):
    """A head whose features stay on the device."""

    needs = DrafterNeeds()

    def observe(self, requests, verdicts, features):
        return


def test_a_head_drafts_where_nothing_is_found_and_no_token_changes():
    """Also when passes without the head come between: it is attached again."""
    both = DraftPlan("ngram", LENGTH, otherwise=DraftPlan("scripted", 2), enough=0.5)
    expected, _ = results(Repeating(), drafts=False)
    for turns in ([2], [2] * 4 + [1] * 3 + [2] * 4 + [0]):
        backend, controller = Repeating(on_device=True), Alternating(turns, (*TURNS, both))
        drafters = [NgramDrafter(NgramDrafter.Options()), Head({}, "right")]
        engine = toy_engine(backend, drafters=drafters, controller=controller)
        added, seen = add_requests(engine), Counter()
        while engine.has_unfinished:
            engine.step()
            seen.update({draft.drafter: draft.accepted for draft in engine.stats.drafts})
        assert [request.output_token_ids for request in added] == expected
        assert not any(request.failed_drafters for request in added)
        assert min(seen["ngram"], seen["scripted"]) > 5
        assert backend.num_launched < 40  # of up to 41 tokens


def test_beside_a_head_a_lookup_needs_a_longer_match():
    """After 5 to 7 equal tokens the head is right more often (docs/lab/2026-11-19-auto-on-gpu.md)."""
    options = NgramDrafter.Options(prompt_lookup_min=3, prompt_lookup_max=8)
    drafting = Drafting({"ngram": NgramDrafter(options), "scripted": Head({}, "right")}, VOCAB).on_device
    alone = DraftPlan("ngram", LENGTH)
    beside = replace(alone, otherwise=DraftPlan("scripted", 2), enough=0.5)
    found = [drafting.draft(plan).look_up for plan in (alone, beside)]
    assert [(own.shortest, own.longest) for own in found] == [(3, 8), (8, 8)]


class TreeHead(Head):
    """A head that drafts trees of a fixed shape."""

    def device_draft(self, plan):
        nodes = plan.nodes if plan.branching > 1 else 0
        return DeviceDraft(plan.levels, runner=object(), branching=plan.branching, nodes=nodes)


def test_lookups_beside_a_head_that_drafts_trees_replace_their_first_path():
    drafters = {"ngram": NgramDrafter(NgramDrafter.Options()), "scripted": TreeHead({}, "right")}
    drafting = Drafting(drafters, VOCAB).on_device
    tree = DraftPlan("scripted", 7, branching=3, depth=4)
    both = replace(tree, drafter="ngram", otherwise=tree, enough=0.5)
    draft = drafting.draft(both)
    assert (draft.nodes, draft.branching, draft.length) == (7, 3, 4)
    assert draft.look_up is not None
    chain = drafting.draft(both.as_chain())
    assert (chain.nodes, chain.branching, chain.length) == (0, 1, 4)
    longer = DraftPlan("ngram", 9, otherwise=tree, enough=0.5)
    assert drafting.draft(longer) is None  # a chain does not fit the shape of a tree
    head_of_chains = {**drafters, "scripted": Head({}, "right")}
    assert Drafting(head_of_chains, VOCAB).on_device.draft(both) is None


def test_tokens_of_host_passes_after_the_prefill_are_in_the_text_too():
    """Most requests need the host at first, so it decodes for all; the text is on the device by then."""

    def outcome(**options):
        drafter = NgramDrafter(NgramDrafter.Options())
        backend = Repeating(supports_masks=False, **options)
        engine = toy_engine(backend, drafter=drafter, budget=LENGTH, branching=1)
        own = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0}
        request = engine.add_request(prompt(0, 5), params(0, **own))[0]
        for number in (1, 2):
            needs_host = {"max_tokens": 12, "bad_words": ["HI"], "ignore_eos": True}
            engine.add_request(prompt(number, 5), params(number, **needs_host))
        drain(engine)
        counts = request.speculative
        return request.output_token_ids, counts.num_draft_tokens, counts.num_accepted_draft_tokens

    assert outcome(on_device=True) == outcome()


class Failing(Head):
    """A head that cannot be attached, as one without memory."""

    asked = 0

    def attach(self, requests):
        self.asked += 1
        raise RuntimeError("no memory")


def test_lookups_continue_without_a_head_that_failed():
    """It is not asked again, and passes stay on the device."""
    both = DraftPlan("ngram", LENGTH, otherwise=DraftPlan("scripted", 2), enough=0.5)
    backend, head = Repeating(on_device=True), Failing({}, "right")
    drafters = [NgramDrafter(NgramDrafter.Options()), head]
    engine = toy_engine(backend, drafters=drafters, controller=Alternating([2], (*TURNS, both)))
    request = engine.add_request(prompt(0, 5), params(0, max_tokens=60, ignore_eos=True))[0]
    drain(engine)
    assert request.failed_drafters == {"scripted"}
    assert head.asked == 1
    assert backend.num_launched > 5
    assert request.speculative.num_accepted_draft_tokens > 20
