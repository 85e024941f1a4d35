"""Requests with options of every kind, what each of them gets alone, and drafters for them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.backends.async_decoding import NgramLookup
from paceline.control.controller import Controller, Load, StepPlan
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DrafterNeeds
from paceline.draft.device import TextDrafts
from paceline.draft.lookup.ngram import NgramDrafter
from tests.engine.test_exactness import prompt
from tests.toy import ToyBackend, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter


def params(number: int, **options: object) -> SamplingParams:
    own = {"temperature": [0.0, 0.9][number % 2], "seed": number, "max_tokens": 6 + 5 * (number % 4)}
    return SamplingParams(**{**own, **options})


def outcome(request):
    return (
        request.output_token_ids,
        request.finish_reason,
        request.stop_reason,
        request.detokenizer.text,
        request.logprobs,
    )


def alone(ids, options):
    engine = toy_engine(ToyBackend())
    (request,) = engine.add_request(ids, options)
    drain(engine)
    return outcome(request)


OPTIONS = [
    {},
    {"speculative": "off"},
    {"ignore_eos": True},
    {"stop": "A"},
    {"top_k": 5},
    {"logprobs": 1},
    {"min_tokens": 4},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}},
    {"logprobs": 3, "logit_bias": {3: 1.5}},
]
BANS = {"allowed_token_ids": range(10, 17), "bad_words": ["HI", "IJ", "JJ", "KL", "M"]}  # the ids are H to N
REQUESTS = [
    *((prompt(number, 1 + 7 * (number % 4)), params(number, **OPTIONS[number % 9])) for number in range(18)),
    *((prompt(number, 5), params(number, **BANS)) for number in (18, 19)),
    (prompt(20, 5), params(20, **BANS, logprobs=2)),
    (prompt(21, 5), params(21, **BANS, logprobs=2, presence_penalty=0.5, top_k=3)),
]
ALONE = {}


def expected(number):
    if number not in ALONE:
        ALONE[number] = alone(*REQUESTS[number])
    return ALONE[number]


class Changing(Controller):
    """Gives all requests chains of one length after the other."""

    def __init__(self, lengths: list[int], hold: int) -> None:
        self.lengths, self.hold, self.step = lengths, hold, 0

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        self.step += 1
        length = self.lengths[self.step // self.hold % len(self.lengths)]
        return StepPlan([DraftPlan("scripted", length) if length else PLAIN for _ in running])


class Hosted(ScriptedDrafter):
    """A drafter that is asked while passes run, and looks at no features."""

    needs = DrafterNeeds()
    device = TextDrafts()

    def observe(self, requests, verdicts, features):
        assert features is None


class Led(Hosted):
    """The same, and where it was wrong the decoder looks chains up."""

    device = TextDrafts(NgramLookup(1, 4))


class LookedUp(NgramDrafter):
    """Chains that the decoder finds in the texts: also behind one token, since the toy seldom repeats two."""

    name = "scripted"

    def __init__(self, truth, style):
        super().__init__(NgramDrafter.Options(prompt_lookup_min=1))
