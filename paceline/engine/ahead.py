"""Decoding whose passes begin before the ones before them were read.

    device   | pass 1    | pass 2    | pass 3    | pass 4
    host     launch 1, 2 | read 1, launch 3      | ...        its work hides behind a pass

While requests merely go on, a pass needs nothing from the host but room for its keys and values: the tokens
of the pass before it are where it runs, and so is what it drafts with, if it does: a head, the texts, and
what the host has expected of them a pass earlier (engine/leads.py). A request that ends leaves
rows behind in the pass in flight, which nobody reads. What these write lies behind the request's committed
tokens, in pages of its own, and whoever gets such a page writes to it in a later pass.

Who comes computes its prompt in a pass of its own behind those in flight, others follow behind that, and when
it was read the request joins them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.backends.ahead import AheadDecoder, AheadDraft, AheadOutput
from paceline.core.features import Features
from paceline.core.request import Request, Status
from paceline.core.schedule import Scheduled
from paceline.core.stats import StepStats
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.drafting import Drafting
from paceline.engine.flight import Flying, PassAhead, PromptPass, joining
from paceline.engine.leads import Leads
from paceline.engine.turns import Turns
from paceline.engine.verification import chosen_verdict
from paceline.kv.cache import KVCache

logger = logging.getLogger(__name__)

SPARE = 64  # tokens of room that are reserved together
MOST_DRAFTS = 5  # lengths of chains: each has buffers of its own; others go step by step
DEPTH = 2  # passes of decoding in flight when the first of them is read
# of a pass that looks up or follows leads: with more there are buffers for plain passes only
MOST_LOOKED_UP_ROWS = 512
# Passes that those who come wait, together, for each one that decodes, and at most: a pass over prompts costs
# all who decode about one of their own, whether it is over one prompt or over three.
WAITED_EACH, MOST_WAITED = 0.25, 8


class RunAhead:
    """The passes in flight, oldest first."""

    def __init__(
        self, make: Callable[[], AheadDecoder | None], drafting: Drafting, kv: KVCache, trims: bool = False
    ) -> None:
        """`make` gives a decoder, if there is one. `trims`: drafts of the host are looked at once more."""
        self._make = make
        self._drafting = drafting
        self._kv = kv
        self._trims = trims
        self._made: AheadDecoder | None = None
        self._drafts: dict[DraftPlan, AheadDraft] = {}
        self._plan = PLAIN  # of the last pass
        self._flight: deque[Flying] = deque()
        self._known: dict[Request, int] = {}  # to the decoder: in how many passes in flight each is
        self._handed: dict[Request, None] = {}  # those that the decoder drafts for
        self._leads = Leads(drafting)
        self._turns = Turns()  # of passes that draft without a head, and of plain ones
        self._knows_texts = False  # whether the decoder is told all tokens of those it knows
        self._waited = 0  # passes, by those who have come and whose prompts have not begun, together
        self._error: Exception | None = None  # that a pass was lost by when it was to begin
        self.is_offered = True  # until there is no decoder: steps should not pay

    def holds(self, requests: Sequence[Request]) -> bool:
        """Whether all passes in flight decode, the last of them for these requests."""
        return bool(self._flight) and self._flight[-1].requests == requests and not self.computing

    @property
    def computing(self) -> list[Request]:
        """Those whose prompts are computed by a pass in flight."""
        return next((flying.requests for flying in self._flight if flying.prompts is not None), [])

    def has_pass(self) -> bool:
        """Whether there is a pass to read. One whose requests have all ended is left unread."""
        while self._flight and all(request.finished for request in self._flight[0].requests):
            if self._error is not None:
                self.drop()  # the pass that was lost is the last
            else:
                self._pop()
        return bool(self._flight)

    @property
    def room(self) -> int:
        """Tokens behind those that are known whose places passes write to or have told the next one of."""
        return self._in_flight() + self._plan.levels + self._spare if self._known else 0

    def _in_flight(self) -> int:
        """Rows of a request that is in all passes in flight."""
        return sum([1 + flying.plan.levels for flying in self._flight if flying.prompts is None])

    def are_enough(self, coming: int, decoding: int) -> bool:
        """Whether it is time to compute the prompts of so many who have come. Asked once a pass."""
        self._waited = self._waited + coming if coming else 0
        if not coming or self._waited < min(WAITED_EACH * decoding, MOST_WAITED):
            return False
        self._waited = 0
        return True

    def add_prompts(self, prompts: PromptPass) -> None:
        """Take a pass over prompts, which has begun behind those in flight."""
        self._flight.append(Flying([part.request for part in prompts.parts], prompts=prompts))

    def foresee(self, parts: Sequence[Scheduled]) -> None:
        """Let the drafter of the last pass see prompts that are being computed: it may go on behind them."""
        draft = self._drafts.get(self._plan)
        ending = [part.request for part in parts if part.num_tokens > 1 and part.reaches_end]
        coming = [request for request in ending if not request.undrafted]
        if coming and draft is not None and draft.runner is not None:
            self._drafting.foresee(self._plan, coming)

    def offers(self, plan: DraftPlan) -> bool:
        """Whether passes by this plan can run ahead."""
        if self._decoder() is None:
            return False
        return plan.budget == 0 or self._draft(plan) is not None

    def launch(self, requests: Sequence[Request], plan: DraftPlan) -> bool:
        """Begin passes over these requests, which all decode and race, as far as there is room for them.

        False if passes by this plan, which is offered, cannot begin now.
        """
        decoder, draft = self._made, self._draft(plan)
        assert decoder is not None
        if plan.drafter != self._plan.drafter:
            if plan.budget and self._in_flight():
                return False  # a drafter begins behind tokens that it knows
            self._take_back()
            self._leads.clear()
        self._plan = plan
        try:
            if draft is not None and draft.runner is None:
                self._launch_in_turn(decoder, requests, draft)
                return True
            while self._num_decoding < DEPTH and self._launch_one(decoder, requests, draft):
                pass
        except Exception as error:  # whoever reads the pass is told
            self._error = error
        return True

    def _launch_in_turn(self, decoder: AheadDecoder, requests: Sequence[Request], draft: AheadDraft) -> None:
        """The same where passes draft without a head, unless plain ones give more."""
        if not self._knows_texts:  # they join again; when a drafter begins, nobody is in flight
            self._known.clear()
            self._knows_texts = True
        fits = draft.most_requests is None or len(requests) <= draft.most_requests
        goes_on = True
        while goes_on and self._num_decoding < DEPTH:
            own = draft if fits and self._turns.looks_up(len(requests)) else None
            goes_on = self._launch_one(decoder, requests, own)

    def observe(self, stats: StepStats) -> None:
        """Take in what a step took and gave, ahead or not."""
        draft = self._drafts.get(self._plan)
        if draft is not None and draft.runner is None:
            self._turns.observe(stats)

    @property
    def _num_decoding(self) -> int:
        """Passes in flight, but those over prompts."""
        return sum([flying.prompts is None for flying in self._flight])

    def _decoder(self) -> AheadDecoder | None:
        if self._made is None and self.is_offered:
            try:
                self._made = self._make()
            except Exception as error:  # such as no memory: it only makes steps quicker
                logger.warning("decoding goes step by step, because it cannot run ahead: %s", error)
            self.is_offered = self._made is not None
        return self._made

    def _draft(self, plan: DraftPlan) -> AheadDraft | None:
        if plan.budget and plan not in self._drafts and len(self._drafts) < MOST_DRAFTS:
            draft = self._drafting.ahead(plan)
            if draft is not None and draft.runner is None:
                decides = self._trims or self._made is None or not self._made.looks_up  # the host
                most = max(1, MOST_LOOKED_UP_ROWS // (1 + plan.levels))
                draft = None if decides else replace(draft, most_requests=most)
            if draft is None:
                return None
            self._drafts[plan] = draft
        return self._drafts.get(plan)

    def _launch_one(
        self, decoder: AheadDecoder, requests: Sequence[Request], draft: AheadDraft | None
    ) -> bool:
        """Whether one more pass was begun."""
        known = self._known
        going = [
            request for request in requests if request.num_output + known.get(request, 0) < request.max_output
        ]
        if self._are_ending(going) or not self._have_room(going):
            return False  # what was reserved in vain is let go by the next commit
        by_head = draft is not None and draft.runner is not None
        fresh = [request for request in going if request not in self._handed and not request.undrafted]
        if fresh and by_head:
            if not self._drafting.hand_over(self._plan, fresh):
                return False
            self._handed.update(dict.fromkeys(fresh))
        new = [request for request in going if request not in known]
        plan = PLAIN if draft is None else self._plan
        self._flight.append(Flying(going, plan))
        if new:
            self._forget_finished()
            decoder.join(joining(new, self._knows_texts))
        for request in going:
            self._known[request] = self._known.get(request, 0) + 1
        slots, tables, leads = [request.slot for request in going], self._kv.page_tables, None
        if draft is not None and draft.leads:
            leads = self._leads.lines(plan, going, draft.leads)
        decoder.launch(slots, tables, draft, leads)
        return True

    def _are_ending(self, requests: Sequence[Request]) -> bool:
        """Whether passes in flight will probably end all of these: another one would be for nobody."""
        each = 1 + self._plan.levels // 2
        return all(
            request.num_output + each * self._known.get(request, 0) >= request.max_output
            for request in requests
        )

    def _have_room(self, requests: Sequence[Request]) -> bool:
        """Whether there are pages for another pass, and for what it tells the next one of."""
        kv, known = self._kv, self._known
        ahead, more = self._in_flight(), 2 * (1 + self._plan.levels) - 1
        lengths = [
            min(len(request.token_ids) + more + (ahead if known.get(request) else 0), request.most_tokens)
            for request in requests
        ]
        if all(length <= kv.room(own.slot) for own, length in zip(requests, lengths, strict=True)):
            return True
        # some for all, so that the device need not be told of a page in every pass
        spare = self._spare
        for request, length in zip(requests, lengths, strict=True):
            more_room = spare and kv.reserve(request.slot, min(length + spare, request.most_tokens))
            if not more_room and not kv.reserve(request.slot, length):
                return False
        return True

    @property
    def _spare(self) -> int:
        """Tokens that requests have room for beyond what passes need, while pages are plenty."""
        pages = self._kv.pages
        return SPARE if 2 * pages.num_available > pages.num_pages else 0

    def _forget_finished(self) -> None:
        self._known = {request: count for request, count in self._known.items() if not request.finished}
        self._handed = {request: None for request in self._handed if not request.finished}
        self._leads.forget_finished()

    def take_prompts(self) -> PromptPass | None:
        """The oldest pass in flight, if it is over prompts."""
        return self._flight.popleft().prompts if self._flight[0].prompts is not None else None

    def read(self) -> PassAhead:
        """The oldest pass, of decoding, without those who have ended. Raises what passes were lost by."""
        if self._error is not None:
            raise self._error
        assert self._made is not None
        output = self._made.read()
        flying = self._pop(was_read=True)
        requests, plan = flying.requests, flying.plan
        rows = [row for row, request in enumerate(requests) if request.status is not Status.FINISHED]
        parts = [Scheduled(requests[row], 1, PLAIN if requests[row].undrafted else plan) for row in rows]
        tokens, counts = output.tokens.tolist(), output.counts.tolist()
        verdicts = [chosen_verdict(tokens[row][: counts[row]], requests[row]) for row in rows]
        shapes = [(part.plan.levels, part.plan.levels) for part in parts] if plan.budget else []
        if output.found is not None:
            shapes = [(found, found) for found in output.found[rows].tolist()]
        return PassAhead(parts, verdicts, plan.levels, shapes, self._features(parts, rows, output))

    def _pop(self, was_read: bool = False) -> Flying:
        """Take the oldest pass out of the flight."""
        flying = self._flight.popleft()
        if flying.prompts is None:
            if not was_read and self._made is not None:
                self._made.skip()
            for request in flying.requests:
                if request in self._known:
                    self._known[request] -= 1
        return flying

    def _features(
        self, parts: Sequence[Scheduled], rows: Sequence[int], output: AheadOutput
    ) -> Features | None:
        """Those of the parts, which are these rows of a pass."""
        if output.features is None:
            return None
        contexts = np.array([part.request.num_computed for part in parts], dtype=np.int32)
        offsets = np.arange(len(parts) + 1, dtype=np.int32)
        layers = self._drafting.feature_layers
        return Features(output.features[rows], layers, offsets, contexts, [1] * len(parts))

    def prepare(self, plan: DraftPlan) -> Mapping[int, float]:
        """Have ready what the first passes by this plan would wait for; their seconds, by their requests."""
        if not self.offers(plan) or self._made is None:
            return {}
        draft = self._draft(plan)
        seconds = self._made.prepare(draft)
        if draft is None or draft.runner is None:
            self._turns.expect(draft is not None, seconds)
        return seconds

    def leave(self) -> None:
        """Other passes follow: what the decoder knows of requests will be out of date."""
        if self._known:
            self._take_back()
            self._known.clear()

    def _take_back(self) -> None:
        """Let the drafter of the last pass go on by itself."""
        if self._handed:
            self._drafting.take_back(
                self._plan, [request for request in self._handed if not request.finished]
            )
            self._handed.clear()

    def drop(self) -> list[Request]:
        """Forget the passes in flight; the requests that wait for them."""
        lost = dict.fromkeys(request for flying in self._flight for request in flying.requests)
        if self._made is not None:
            self._made.drop()
        self._flight.clear()
        self._known.clear()
        self._handed.clear()
        self._error = None
        return [request for request in lost if not request.finished]
