"""Decode passes that need nothing from the host: drafts are made and tokens are chosen on the device.

    device   | pass 1    | pass 2    | pass 3    | pass 4
    host     launch 1, 2 | read 1, launch 3      | ...        its work overlaps with a pass

While requests merely go on, a pass needs nothing from the host but room for its keys and values: the tokens
of the pass before it are on the device, and so is what it drafts with: a head, the requests' own texts, and
what the host expected of them a pass earlier (engine/optimistic.py). A request that ends leaves rows behind
in the pass in flight, which nobody reads. They write behind the request's committed tokens, in pages of its
own, and whoever gets such a page writes to it in a later pass.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.backends.async_decoding import AsyncDecoder, DecodeOutput, DeviceDraft, SlotInits
from paceline.core.features import Features
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.drafting import Drafting
from paceline.engine.optimistic import OptimisticDrafts
from paceline.engine.pipeline import InFlight, Schedule, StepResult, StepTimer
from paceline.engine.shadow import ShadowDrafts
from paceline.engine.verification import chosen_verdict
from paceline.kv.cache import KVCache

logger = logging.getLogger(__name__)

SPARE_TOKENS = 64  # room that is reserved at once, so that few passes must send new page numbers
MAX_DRAFTS = (
    5  # kinds of drafts (drafter and length): each has buffers of its own; others go through the host
)
MAX_TEXT_DRAFT_ROWS = 512  # of a pass that drafts from texts: with more requests there are no buffers for it


class DeviceExecutor:
    """Launches decode passes on the device, and reads them in the same order."""

    on_device = True

    def __init__(self, make: Callable[[], AsyncDecoder | None], drafting: Drafting, kv: KVCache) -> None:
        """`make` gives the backend's decoder, None if it has none."""
        self._make = make
        self._drafting = drafting
        self._kv = kv
        self._made: AsyncDecoder | None = None
        self._is_missing = False  # the backend has no decoder, or there was no memory for it
        self._drafts: dict[DraftPlan, DeviceDraft] = {}
        self._passes: deque[tuple[list[Request], DraftPlan]] = deque()  # in flight
        self._known: dict[Request, int] = {}  # to the decoder: how many passes in flight each takes part in
        self._attached: dict[Request, None] = {}  # those that a head drafts for on the device
        self._attached_plan = PLAIN  # by which it does
        self._last_plan = PLAIN
        self._optimistic = OptimisticDrafts(drafting)
        self.shadow = ShadowDrafts(drafting)

    def decoder(self) -> AsyncDecoder | None:
        """The backend's decoder, made when it is first asked for; None if there is none."""
        if self._made is None and not self._is_missing:
            try:
                self._made = self._make()
            except Exception as error:  # such as no memory: it only makes steps faster
                logger.warning("passes do not overlap with the host's work, because %s", error)
            self._is_missing = self._made is None
        return self._made

    def draft(self, plan: DraftPlan) -> DeviceDraft | None:
        """What the decoder drafts with by this plan; None if it cannot."""
        decoder = self.decoder()
        if decoder is None or not plan.budget:
            return None
        if plan not in self._drafts and len(self._drafts) < MAX_DRAFTS:
            draft = self._drafting.device_draft(plan)
            if draft is not None and draft.runner is None:
                rows = max(1, MAX_TEXT_DRAFT_ROWS // (1 + plan.levels))
                draft = replace(draft, max_requests=rows) if decoder.supports_lookup else None
            if draft is None:
                return None
            self._drafts[plan] = draft
        return self._drafts.get(plan)

    def offers(self, plan: DraftPlan) -> bool:
        """Whether passes by this plan can run on the device."""
        return self.decoder() is not None and (plan.budget == 0 or self.draft(plan) is not None)

    def can_follow(self, plan: DraftPlan) -> bool:
        """Whether a pass by this plan can be launched behind those in flight."""
        draft = self.draft(plan)
        by_head = draft is not None and draft.runner is not None
        # a head begins behind tokens that it knows
        return not by_head or not self._passes or self._attached_plan.drafter == plan.drafter

    def fitting(self, plan: DraftPlan, requests: int) -> DraftPlan:
        """This plan, or the plain one where passes by it have no buffers for so many requests."""
        draft = self.draft(plan)
        fits = draft is None or draft.max_requests is None or requests <= draft.max_requests
        return plan if fits else PLAIN

    def admit(self, requests: Sequence[Request], plan: DraftPlan) -> list[Request]:
        """Those of the requests that another pass goes on with: KV reserved, and a head that is to draft for
        them has computed their tokens.

        None of them if there are no pages, or if the passes in flight will probably end all of them.
        """
        known = self._known
        going = [own for own in requests if own.num_output + known.get(own, 0) < own.max_output]
        each = 1 + plan.levels // 2  # tokens that a pass in flight probably gives
        if all(own.num_output + each * known.get(own, 0) >= own.max_output for own in going):
            return []
        # what was reserved in vain is released by the next commit
        return going if self._reserved(going, plan) and self._attached_to(going, plan) else []

    def _attached_to(self, requests: Sequence[Request], plan: DraftPlan) -> bool:
        """Whether the head that is to draft, if any, now drafts for all of these on the device."""
        if self._attached and plan.drafter != self._attached_plan.drafter:
            self._detach()
        draft = self.draft(plan)
        if draft is None or draft.runner is None:
            return True
        new = [own for own in requests if own not in self._attached and not own.undrafted]
        if new and not self._drafting.attach(plan, new):
            return False
        self._attached.update(dict.fromkeys(new))
        self._attached_plan = plan
        return True

    def _reserved(self, requests: Sequence[Request], plan: DraftPlan) -> bool:
        """Whether there are pages for another pass, and for what it tells the next one of."""
        kv, known = self._kv, self._known
        rows_in_flight, more = self._rows_in_flight(), 2 * (1 + plan.levels) - 1
        lengths = [
            min(len(own.token_ids) + more + (rows_in_flight if known.get(own) else 0), own.most_tokens)
            for own in requests
        ]
        if all(length <= kv.room(own.slot) for own, length in zip(requests, lengths, strict=True)):
            return True
        spare = self._spare
        for request, length in zip(requests, lengths, strict=True):
            has_spare = spare and kv.reserve(request.slot, min(length + spare, request.most_tokens))
            if not has_spare and not kv.reserve(request.slot, length):
                return False
        return True

    def _rows_in_flight(self) -> int:
        """Rows of a request that takes part in all passes in flight."""
        return sum([1 + plan.levels for _, plan in self._passes])

    @property
    def _spare(self) -> int:
        """Tokens that requests have room for beyond what passes need, while pages are plenty."""
        pages = self._kv.pages
        return SPARE_TOKENS if 2 * pages.num_available > pages.num_pages else 0

    @property
    def lookahead(self) -> int:
        """Tokens behind the committed ones whose pages a commit must not release."""
        return self._rows_in_flight() + self._last_plan.levels + self._spare if self._known else 0

    def begin(self, schedule: Schedule, timer: StepTimer) -> InFlight:
        """Launch a pass over requests that all decode, have one plan, and whose room is reserved."""
        requests, plan = schedule.requests, common_plan(schedule.parts)
        decoder, draft = self.decoder(), self.draft(plan)
        assert decoder is not None
        if plan.drafter != self._last_plan.drafter and plan.budget:
            self._optimistic.clear()
        self._last_plan = plan
        new = [request for request in requests if request not in self._known]
        self._passes.append((requests, plan))
        if new:
            self._forget_finished()
            decoder.join(_slot_inits(new, with_texts=decoder.supports_lookup and self._drafting.reads_texts))
        for request in requests:
            self._known[request] = self._known.get(request, 0) + 1
        expected = None
        if draft is not None and draft.host_tokens:
            expected = self._optimistic.rows(plan, requests, draft.host_tokens)
        decoder.launch([request.slot for request in requests], self._kv.page_tables, draft, expected)
        self._shadow(schedule, requests, plan)
        return InFlight(schedule, self._read, self._skip)

    def _shadow(self, schedule: Schedule, requests: Sequence[Request], plan: DraftPlan) -> None:
        """Draft beside a plain pass, while it runs, if the controller wants to learn from that."""
        wanted = None if schedule.step_plan is None else schedule.step_plan.shadow
        if wanted is not None and not plan.budget:
            self.shadow.follow(wanted, requests)
        else:
            self.shadow.clear()

    def _read(self, timer: StepTimer) -> StepResult:
        """Wait for the oldest pass; those of its requests that have ended are left out."""
        assert self._made is not None
        output = self._made.read()
        timer.end("forward")
        requests, plan = self._pop()
        rows = [row for row, request in enumerate(requests) if not request.finished]
        parts = [Scheduled(requests[row], 1, PLAIN if requests[row].undrafted else plan) for row in rows]
        tokens, counts = output.tokens.tolist(), output.counts.tolist()
        verdicts = [chosen_verdict(tokens[row][: counts[row]], requests[row]) for row in rows]
        shapes = [(part.plan.levels, part.plan.levels) for part in parts] if plan.budget else []
        if output.found is not None:
            shapes = [(found, found) for found in output.found[rows].tolist()]
        attended = (1 + plan.levels) * sum([part.request.num_computed for part in parts])
        features = self._features(parts, rows, output)
        timer.end("verify")
        return StepResult(parts, verdicts, shapes, features, (1 + plan.levels) * len(parts), attended)

    def _skip(self) -> None:
        """Leave the oldest pass unread: all of its requests have ended."""
        if self._made is not None:
            self._made.skip()
        self._pop()

    def _pop(self) -> tuple[list[Request], DraftPlan]:
        requests, plan = self._passes.popleft()
        for request in requests:
            if request in self._known:
                self._known[request] -= 1
        return requests, plan

    def _features(
        self, parts: Sequence[Scheduled], rows: Sequence[int], output: DecodeOutput
    ) -> Features | None:
        """Those of the parts, which are these rows of a pass."""
        if output.features is None:
            return None
        contexts = np.array([part.request.num_computed for part in parts], dtype=np.int32)
        offsets = np.arange(len(parts) + 1, dtype=np.int32)
        layers = self._drafting.feature_layers
        return Features(output.features[rows], layers, offsets, contexts, [1] * len(parts))

    def prefill_ahead(self, parts: Sequence[Scheduled]) -> None:
        """Let the head that drafts now compute prompts behind the pass that is computing them."""
        draft = self._drafts.get(self._last_plan)
        if draft is None or draft.runner is None:
            return
        ending = [part.request for part in parts if part.num_tokens > 1 and part.reaches_end]
        coming = [request for request in ending if not request.undrafted]
        if coming:
            self._drafting.prefill_ahead(self._last_plan, coming)

    def prepare(self, plan: DraftPlan) -> Mapping[int, float]:
        """Have ready what the first passes by this plan would wait for; their seconds, by their requests."""
        decoder = self.decoder()
        return decoder.prepare(self.draft(plan)) if decoder is not None and self.offers(plan) else {}

    def leave(self) -> None:
        """Passes of the host follow: what the decoder knows of requests will be out of date."""
        assert not self._passes
        self._detach()
        self.shadow.clear()
        self._known.clear()

    def _detach(self) -> None:
        """Let the head that drafts on the device go on on the host."""
        if self._attached:
            left = [request for request in self._attached if not request.finished]
            self._drafting.detach(self._attached_plan, left)
            self._attached.clear()

    def drop(self) -> None:
        """Forget the passes in flight: one of them was lost."""
        if self._made is not None:
            self._made.drop()
        self._passes.clear()
        self._known.clear()
        self._attached.clear()

    def _forget_finished(self) -> None:
        self._known = {request: count for request, count in self._known.items() if not request.finished}
        self._attached = {request: None for request in self._attached if not request.finished}
        self._optimistic.forget_finished()


def common_plan(parts: Sequence[Scheduled]) -> DraftPlan:
    """The plan of a device pass: that of all its requests that want drafts."""
    return next((part.plan for part in parts if part.plan.budget), PLAIN)


def _slot_inits(requests: Sequence[Request], with_texts: bool) -> SlotInits:
    """What the decoder must know of requests that it does not know yet; for look-ups all of their texts."""
    params = [request.params for request in requests]
    return SlotInits(
        slots=np.array([request.slot for request in requests], dtype=np.int32),
        tokens=np.array([[0, *request.token_ids[-2:]][-2:] for request in requests], dtype=np.int32),
        lengths=np.array([request.num_computed for request in requests], dtype=np.int32),
        limits=np.array([request.most_tokens - 1 for request in requests], dtype=np.int32),
        seeds=np.array([request.seed for request in requests], dtype=np.uint64),
        temperatures=np.array([own.temperature for own in params], dtype=np.float64),
        takes_drafts=np.array([not request.undrafted for request in requests]),
        truncation=np.array([own.truncation for own in params], dtype=np.float64),
        texts=[np.array(own.token_ids, dtype=np.int32) for own in requests] if with_texts else None,
    )
