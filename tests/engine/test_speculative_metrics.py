"""The drafting statistics of steps and requests, and each request's own speculative options."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.engine.outputs import request_output
from paceline.errors import RequestError
from paceline.kv.pages import pages_for
from tests.engines import new_engine
from tests.toy import VOCAB, ToyBackend, ToyTokenizer, drain, toy_engine

IDS = [5, 9, 33, 71]
PLAIN_OUTPUT = 24


def truth() -> list[int]:
    engine = toy_engine()
    (request,) = engine.add_request(
        IDS, SamplingParams(temperature=0, max_tokens=PLAIN_OUTPUT, ignore_eos=True)
    )
    drain(engine)
    return request.output_token_ids


class Lengths(Drafter):
    """Drafts chains of given lengths, one for each step, right up to a given depth."""

    def __init__(self, name: str, steps: Sequence[tuple[int, int]]) -> None:
        self.name = name
        self.steps = steps
        self.truth = truth()
        self.plans: list[DraftPlan] = []

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        chains = []
        for request, plan in zip(requests, plans, strict=True):
            length, right = self.steps[len(self.plans) % len(self.steps)]
            self.plans.append(plan)
            coming = self.truth[request.num_output :][: min(length, plan.budget)]
            chains.append([(token + (depth >= right)) % VOCAB for depth, token in enumerate(coming)])
        return DraftTrees.chains(chains)


def engine_with(*drafters: Lengths, budget: int = 6) -> Engine:
    plans = {drafter.name: DraftPlan(drafter.name, budget) for drafter in drafters}
    return new_engine(
        ToyBackend(),
        ToyTokenizer(),
        Limits(VOCAB, 128, 8, 32),
        num_pages=200,
        controller=FixedController(next(iter(plans.values()))),
        drafters={drafter.name: drafter for drafter in drafters},
        plans=plans,
    )


def add(engine: Engine, **options: object) -> Request:
    usual = {"temperature": 0, "max_tokens": PLAIN_OUTPUT, "ignore_eos": True}
    (request,) = engine.add_request(IDS, SamplingParams(**(usual | options)))
    return request


def metrics(request: Request):
    return request_output(None, [request], ToyTokenizer()).metrics.speculative


def test_a_step_reports_which_nodes_were_accepted():
    class Beside(Lengths):
        """A wrong token beside the right one at every level."""

        def propose(self, requests, plans):
            tokens = self.truth[requests[0].num_output :]
            return DraftTrees.from_lists(
                [([(tokens[0] + 1) % VOCAB, tokens[0], (tokens[1] + 1) % VOCAB, tokens[1]], [-1, -1, 1, 1])]
            )

    drafter = Beside("suffix", [(4, 4)])
    plan = DraftPlan("suffix", 4, branching=2)
    engine = new_engine(
        ToyBackend(),
        ToyTokenizer(),
        Limits(VOCAB, 128, 8, 32),
        num_pages=200,
        controller=FixedController(plan),
        drafters={"suffix": drafter},
    )
    add(engine)
    engine.step()
    engine.step()
    (facts,) = engine.stats.drafts
    assert (facts.nodes, facts.accepted, facts.path) == (4, 2, (1, 3))


def test_rates_per_position_divide_by_the_drafts_that_went_so_deep():
    # lengths 4, 2, 1 in rotation; 1, 2, 0 of the tokens are right
    engine = engine_with(Lengths("ngram", [(4, 1), (2, 2), (1, 0)]))
    request = add(engine, max_tokens=20)
    drain(engine)
    told = metrics(request)
    assert told.num_spec_steps == 9
    assert told.num_draft_tokens == 3 * (4 + 2 + 1)
    assert told.acceptance_histogram == [3, 3, 3]
    assert told.drafts_per_position == [9, 6, 3, 3]
    assert told.accepted_per_position == [6, 3, 0, 0]
    assert told.acceptance_rate_per_position == [6 / 9, 3 / 6, 0, 0]
    assert told.mean_acceptance_length == 1 + 9 / 9
    assert told.draft_acceptance_rate == 9 / 21
    assert told.draft_time > 0
    assert told.verify_time > 0


def test_nothing_below_the_token_that_ends_a_request_counts():
    engine = engine_with(Lengths("ngram", [(6, 6)]))
    request = add(engine, stop_token_ids=[truth()[3]])
    drain(engine)
    told = metrics(request)
    assert request.output_token_ids == truth()[:4]
    assert told.drafts_per_position == [1, 1, 1]  # the first token came from the prompt's pass
    assert told.accepted_per_position == [1, 1, 1]
    assert told.num_accepted_draft_tokens == 3


def test_a_stop_string_inside_a_draft_ends_the_count_too():
    text = ToyTokenizer().decode(truth()[:3])
    engine = engine_with(Lengths("ngram", [(6, 6)]))
    request = add(engine, stop=[text[-1]])
    plain = toy_engine()
    expected = plain.add_request(IDS, request.params)[0]
    drain(plain)
    drain(engine)
    assert request.output_token_ids == expected.output_token_ids
    assert request.detokenizer.text == expected.detokenizer.text
    assert metrics(request).num_accepted_draft_tokens == request.num_output - 1


def test_a_step_reports_each_draft():
    engine = engine_with(Lengths("ngram", [(4, 1)]))
    drafted, plain = add(engine), add(engine, speculative="off")
    engine.step()  # prompts
    assert engine.stats.drafts == ()
    engine.step()
    (draft,) = engine.stats.drafts
    assert (draft.request_id, draft.drafter) == (drafted.request_id, "ngram")
    assert (draft.nodes, draft.depth, draft.accepted) == (4, 4, 1)
    assert (engine.stats.drafted, engine.stats.accepted, engine.stats.new_tokens) == (4, 1, 3)
    assert plain.speculative.num_spec_steps == 0


def test_requests_of_one_batch_choose_their_own_method_length_and_shape():
    ngram, suffix = Lengths("ngram", [(9, 1)]), Lengths("suffix", [(9, 2)])
    engine = engine_with(ngram, suffix)
    asked = [None, "auto", "off", "suffix", {"num_speculative_tokens": 2}]
    asked += [{"method": "suffix", "num_speculative_tokens": 5, "branching": 3, "depth": 4}]
    asked += [{"num_speculative_tokens": 0}]
    requests = [add(engine, speculative=speculative) for speculative in asked]
    engine.step()
    engine.step()
    assert ngram.plans == [DraftPlan("ngram", 6), DraftPlan("ngram", 6), DraftPlan("ngram", 2)]
    assert suffix.plans == [DraftPlan("suffix", 6), DraftPlan("suffix", 5, branching=3, depth=4)]
    drain(engine)
    assert all(request.output_token_ids == truth() for request in requests)
    assert [bool(metrics(request).num_spec_steps) for request in requests] == [1, 1, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ("sufix", "'sufix', which does not exist: did you mean 'suffix'\\? This engine has ngram"),
        ({"method": "draft_model", "strict": True}, "has not loaded.*or leave out strict"),
        ({"method": "draft_model", "depth": 0}, "depth must be"),
        ({"strict": 1}, "strict must be True or False"),
        ({"length": 3}, "unknown option 'length'"),
        ({"num_speculative_tokens": -1}, "0 is plain decoding"),
        ({"num_speculative_tokens": 32}, "at most 32 rows.*Use at most 31"),
        ({"num_speculative_tokens": "3"}, "num_speculative_tokens must be an integer"),
        ({"branching": 0}, "branching must be"),
        ({"branching": 2}, "ngram drafts chains"),
        ({"depth": 0}, "depth must be"),
        (3, "speculative must be 'off'"),
    ],
)
def test_speculative_options_that_cannot_be_met_are_refused(speculative, message):
    engine = engine_with(Lengths("ngram", [(1, 1)]))
    with pytest.raises(RequestError, match=message):
        add(engine, speculative=speculative)
    assert not engine.has_unfinished


def test_a_method_that_is_not_loaded_is_replaced_by_the_default_and_metrics_say_so():
    ngram = Lengths("ngram", [(9, 9)])
    engine = engine_with(ngram)
    asked = {"method": "eagle3", "num_speculative_tokens": 3}
    requests = [add(engine, speculative=speculative) for speculative in ("eagle3", asked, "ngram")]
    drain(engine)
    assert all(request.output_token_ids == truth() for request in requests)
    assert [metrics(request).unavailable_drafter for request in requests] == ["eagle3", "eagle3", None]
    assert {plan.budget for plan in ngram.plans[:3]} == {6}  # the default, not the options of another method
    assert all(metrics(request).num_spec_steps for request in requests)


def test_a_hint_is_served_where_the_named_method_would_not_even_fit_into_a_pass():
    engine = toy_engine(max_num_seqs=2, max_num_batched_tokens=4)
    request = add(engine, speculative="eagle3")
    assert (request.plan, request.unavailable_drafter) == (None, "eagle3")


def test_plain_decoding_is_there_whatever_method_is_named():
    request = add(toy_engine(), speculative={"method": "eagle3", "num_speculative_tokens": 0})
    assert request.undrafted
    assert request.unavailable_drafter is None


def test_an_engine_without_drafters_has_off_auto_and_grammar():
    engine = toy_engine()
    assert add(engine, speculative="off").plan is not None
    assert add(engine, speculative="auto").plan is None
    with pytest.raises(RequestError, match="It has grammar"):
        add(engine, speculative={"method": "ngram", "strict": True})


def test_pages_reserved_for_rejected_drafts_are_released():
    engine = engine_with(Lengths("ngram", [(20, 0)]), budget=20)
    request = add(engine)
    engine.step()
    engine.step()
    assert engine.stats.drafted == 20
    held = engine.kv.pages.num_pages - engine.kv.pages.num_available
    assert held == pages_for(len(request.token_ids), engine.kv.page_size)
