"""DeviceExecutor: decode passes that draft and sample on the device, while the host works on the last one.

    device   | pass 1    | pass 2    | pass 3    | pass 4
    host     launch 1, 2 | read 1, launch 3      | ...        the host's work overlaps with a pass

A decode pass needs nothing from the host but pages for its keys and values: the tokens of the previous pass
are on the device, and so is what it drafts with: a head, the requests' own texts, and the host's optimistic
drafts (executors/optimistic.py). A request that ends still has rows in the pass in flight. They are not read;
they write after the request's committed tokens, in pages that only it holds, and the next holder of such a
page writes to it in a later pass.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.backends.async_decoding import AsyncDecoder, DecodeOutput, SlotInits
from paceline.core.arrays import Float64Array
from paceline.core.features import Features
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.trees import PLAIN, DraftPlan
from paceline.core.verdict import Verdict
from paceline.engine.drafting import Drafting
from paceline.engine.executors.attached_head import AttachedHead
from paceline.engine.executors.device_plans import DevicePlans
from paceline.engine.executors.device_results import (
    CHANGES,
    LOGPROBS,
    TOKEN_MASK,
    accepted_paths,
    advance_sampling,
    drafted_parts,
)
from paceline.engine.executors.device_texts import DeviceTexts
from paceline.engine.executors.optimistic import OptimisticDrafts
from paceline.engine.executors.shadow import ShadowDrafts
from paceline.engine.executors.token_masks import TokenMasks
from paceline.engine.executors.verification import chosen_verdict
from paceline.engine.pipeline import InFlight, Schedule, StepResult, StepTimer
from paceline.errors import BackendError
from paceline.kv.cache import KVCache

logger = logging.getLogger(__name__)

SPARE_TOKENS = 64  # tokens reserved at once, so that few passes have to send new page numbers


class DeviceExecutor:
    """Launches decode passes on the device, and reads them in the same order."""

    on_device = True

    def __init__(
        self,
        make_decoder: Callable[[], AsyncDecoder | None],
        drafting: Drafting,
        kv: KVCache,
        vocab_size: int,
    ) -> None:
        """`make_decoder` returns the backend's decoder, or None if the backend has none."""
        self._drafting = drafting
        self._kv = kv
        self.decoder = _decoder_or_none(make_decoder)
        # the SamplingNeeds that the decoder cannot do
        self._unsupported = -1 if self.decoder is None else ~int(self.decoder.supported_sampling)
        self.plans = DevicePlans(self.decoder, drafting)
        self._passes: deque[tuple[list[Scheduled], DraftPlan]] = deque()  # in flight
        self._joined: dict[Request, int] = {}  # requests in the decoder: their passes in flight
        self._texts = DeviceTexts()
        self._head = AttachedHead(drafting.on_device)
        self._last_plan = PLAIN
        self._second: tuple[list[Scheduled], list[Scheduled]] = ([], [])  # parts, and their `otherwise` parts
        self._optimistic = OptimisticDrafts(drafting)
        self.shadow = ShadowDrafts(drafting)
        self._masks = TokenMasks(vocab_size)
        # of the pass that waits for token masks: its masked requests, all of them, and whether it drafts
        self._waiting: tuple[list[Request], list[Request], bool] | None = None
        self._mask_failure: Exception | None = None  # of the pass that waited for masks

    @property
    def waits_for_masks(self) -> bool:
        """Whether the last pass waits for token masks: nothing else can be launched."""
        return self._waiting is not None

    @property
    def needs_features(self) -> bool:
        """Whether drafters read features of the target's passes on the host. Each pass is then read before
        the next is launched. Features in a head's pool stay on the device."""
        return bool(self._drafting.feature_layers)

    def can_sample(self, request: Request) -> bool:
        """Whether the device can sample a request's next tokens."""
        return not request.sampling_needs & self._unsupported

    def can_follow(self, plan: DraftPlan) -> bool:
        """Whether a pass by this plan can be launched after those in flight."""
        draft = self.plans.draft(plan)
        by_head = draft is not None and not draft.from_texts
        # another head than the one in use needs all tokens, so no pass may be in flight
        return not by_head or not self._passes or self._head.is_head_of(plan)

    def has_joined(self, request: Request) -> bool:
        """Whether a request decodes on the device: the host may not decode it before `leave`."""
        return request in self._joined

    def forced_plan(self, requests: Sequence[Request]) -> DraftPlan:
        """In place of the plain plan: chains of tokens that grammars force, if they are worth their rows."""
        return self.plans.choose_forced(requests, self._count_coming)

    def _count_coming(self) -> Mapping[Request, int]:
        """The tokens that passes in flight will sample of forced runs."""
        coming: Counter[Request] = Counter()
        for parts, in_flight in self._passes:  # one, when the next is scheduled
            tokens = 1 + (in_flight.levels if self._drafting.only_forced(in_flight) else 0)
            for part in parts:
                coming[part.request] += tokens
        return coming

    def admit(self, requests: Sequence[Request], plan: DraftPlan) -> list[Request]:
        """The requests of the next pass: pages are reserved, and the head that drafts for them is attached.

        Empty if there are no pages, or if the passes in flight will probably finish all of them.
        """
        in_flight, rows_in_flight = self._joined, self._rows_in_flight()
        tokens_per_pass = 1 + plan.levels // 2  # tokens that a pass in flight probably gives
        new_rows = 2 * plan.nodes + 1
        admitted, lengths, is_short = [], [], True
        for request in requests:
            passes, length, limit = in_flight.get(request, 0), len(request.token_ids), request.most_tokens
            if length + passes < limit:  # else the passes in flight will finish it
                is_short = is_short and length + tokens_per_pass * passes >= limit
                admitted.append(request)
                lengths.append(min(length + new_rows + (rows_in_flight if passes else 0), limit))
        # pages that were reserved and are not used are released by the next commit
        if is_short or not self._reserve(admitted, lengths):
            return []
        return admitted if self._attach(admitted, plan) else []

    def _attach(self, requests: Sequence[Request], plan: DraftPlan) -> bool:
        """Whether the plan's head, if it has one, drafts for all of these requests on the device now."""
        if not self._head.is_head_of(plan):
            self._head.detach()
        draft = self.plans.draft(plan)
        return draft is None or draft.from_texts or self._head.attach(requests, plan)

    def _reserve(self, requests: Sequence[Request], lengths: Sequence[int]) -> bool:
        """Whether the requests have pages for these lengths now; with spare ones, up to their limits."""
        kv = self._kv
        rooms = kv.rooms.tolist()
        pairs = zip(requests, lengths, strict=True)
        if not [request for request, length in pairs if length > rooms[request.slot]]:
            return True
        spare = self._spare
        for request, length in zip(requests, lengths, strict=True):
            more = min(length + spare, request.most_tokens)
            if not kv.reserve(request.slot, more) and not kv.reserve(request.slot, length):
                return False
        return True

    def _rows_in_flight(self) -> int:
        """Rows in flight of a request that takes part in all passes in flight."""
        return sum([1 + plan.nodes for _, plan in self._passes])

    @property
    def _spare(self) -> int:
        """Extra tokens to reserve per request; 0 when pages are scarce."""
        return SPARE_TOKENS if self._kv.can_spare(SPARE_TOKENS) else 0

    @property
    def lookahead(self) -> int:
        """Tokens after the committed ones whose pages a commit must not release."""
        return self._rows_in_flight() + self._last_plan.nodes + self._spare if self._joined else 0

    def begin(self, schedule: Schedule, timer: StepTimer) -> InFlight:
        """Launch a pass over decoding requests that have their pages reserved."""
        requests, plan = schedule.requests, schedule.plan
        decoder, draft = self.decoder, self.plans.draft(plan)
        assert decoder is not None
        if plan.drafter != self._last_plan.drafter and plan.budget:
            self._optimistic.clear()
        self._last_plan = plan
        new = [request for request in requests if request not in self._joined]
        self._passes.append((schedule.parts, plan))
        if new:
            self._forget_finished()
            self._texts.forget_stale(new)
            decoder.join(SlotInits.of(new))
        for request in requests:
            self._joined[request] = self._joined.get(request, 0) + 1
        expected = None
        if draft is not None and draft.reads_texts:
            self._texts.write(decoder, requests)
        if draft is not None and draft.host_tokens:
            expected = self._optimistic.rows(plan, schedule.parts, draft.host_tokens)
        decoder.launch([request.slot for request in requests], self._kv.page_tables, draft, expected)
        masked = [request for request in requests if request.sampling.is_masked]
        if masked:
            self._waiting = masked, requests, draft is not None
            self.send_masks()
        self._shadow(schedule, requests, plan)
        return InFlight(schedule, self._read, self._skip)

    def send_masks(self) -> None:
        """Let the pass that waits for token masks sample, once all tokens before it are known.

        If that fails, reading the pass raises the error.
        """
        decoder = self.decoder
        if self._waiting is None or decoder is None:
            return
        masked, requests, drafts = self._waiting
        if any(self._joined.get(request, 0) > 1 and not request.finished for request in masked):
            return  # another pass over these requests has not been read
        self._waiting = None
        try:
            decoder.send_masks(*self._masks.of_pass(requests, decoder.drafted() if drafts else None))
        except Exception as error:
            self._mask_failure = error

    def _shadow(self, schedule: Schedule, requests: Sequence[Request], plan: DraftPlan) -> None:
        """Make shadow drafts while a plain pass runs, if the step plan asks for them."""
        wanted = None if schedule.step_plan is None else schedule.step_plan.shadow
        if wanted is not None and not plan.budget and self.plans.draft(wanted) is not None:
            self.shadow.follow(wanted, requests)
        else:
            self.shadow.clear()

    def _read(self, timer: StepTimer) -> StepResult:
        """The result of the oldest pass, waited for; requests that have ended are left out."""
        assert self.decoder is not None
        self.send_masks()  # if this pass waits, all before it were skipped
        if self._mask_failure is not None:
            raise self._mask_failure
        output = self.decoder.read()
        timer.end("forward")
        parts, plan = self._pop()
        rows = [row for row, part in enumerate(parts) if part.request.finish_reason is None]
        if len(rows) < len(parts):
            parts = [parts[row] for row in rows]
        tokens, counts = output.tokens.tolist(), output.counts.tolist()
        verdicts = [
            chosen_verdict(tokens[row][: counts[row]], part.request)
            for row, part in zip(rows, parts, strict=True)
        ]
        for place, (row, part) in enumerate(zip(rows, parts, strict=True)):
            if needs := part.request.sampling_needs & (CHANGES | LOGPROBS):
                logprobs = None if output.logprobs is None else output.logprobs[row]
                verdicts[place] = self._advanced(part.request, needs, verdicts[place], logprobs)
        found = None if output.found is None else output.found[rows].tolist()
        parts, shapes = drafted_parts(
            parts, self._second_parts(parts, plan), plan, found, self._drafting.only_forced(plan)
        )
        width, paths = 1 + plan.nodes, accepted_paths(output, rows)
        attended = width * sum([part.request.num_computed for part in parts])
        features = self._features(parts, rows, output)
        timer.end("verify")
        return StepResult(parts, verdicts, shapes, features, width * len(parts), attended, paths)

    def _advanced(
        self, request: Request, needs: int, verdict: Verdict, logprobs: Float64Array | None
    ) -> Verdict:
        """The verdict with log-probabilities, after the sampling state has followed its tokens."""
        error = self._masks.error_on(request, verdict.tokens) if needs & TOKEN_MASK else None
        try:
            if error is None:
                advance_sampling(request, needs, verdict, logprobs)
        except BackendError as limit:  # of the grammar
            error = limit
        return verdict if error is None else Verdict((), (), error=error)

    def _second_parts(self, parts: list[Scheduled], plan: DraftPlan) -> list[Scheduled]:
        """The parts as the `otherwise` plan drafts for them; made once for passes over the same requests."""
        if self._second[0] is not parts and plan.otherwise is not None:
            second = plan.second()
            drafted = [
                Scheduled(part.request, part.num_tokens, second) if part.plan.budget else part
                for part in parts
            ]
            self._second = parts, drafted
        return self._second[1]

    def _skip(self) -> None:
        """Do not read the oldest pass: all of its requests have ended."""
        self.send_masks()
        if self.decoder is not None:
            self.decoder.skip()
        self._pop()

    def _pop(self) -> tuple[list[Scheduled], DraftPlan]:
        parts, plan = self._passes.popleft()
        in_flight = self._joined
        for part in parts:
            if part.request in in_flight:
                in_flight[part.request] -= 1
        return parts, plan

    def _features(
        self, parts: Sequence[Scheduled], rows: Sequence[int], output: DecodeOutput
    ) -> Features | None:
        """The features of the parts, which are these rows of the pass; None if it has none."""
        if output.features is None:
            return None
        contexts = np.array([part.request.num_computed for part in parts], dtype=np.int32)
        offsets = np.arange(len(parts) + 1, dtype=np.int32)
        layers = self._drafting.feature_layers
        return Features(output.features[rows], layers, offsets, contexts, [1] * len(parts))

    def prefill_ahead(self, parts: Sequence[Scheduled], plan: DraftPlan) -> None:
        """Let a head catch up after the pass that prefills these requests, if passes by this plan follow, and
        write their texts to the device if these passes read them.

        The passes will be by the plan that most of these requests want: see SharedPlanner.
        """
        wanted = [
            plan if part.request.plan is None else part.request.plan
            for part in parts
            if self.plans.has_vote(part.request)
        ]
        plan = Counter(wanted or [plan]).most_common(1)[0][0]
        draft, decoder = self.plans.draft(plan), self.decoder
        prefilled = [part.request for part in parts if part.num_tokens > 1 and part.reaches_end]
        self._texts.forget(prefilled)  # a preempted one may have another slot now
        if decoder is None or draft is None or not prefilled:
            return
        if draft.reads_texts:  # now, while the prefill runs: the host has nothing else to do
            self._texts.write(decoder, prefilled)
        if not draft.from_texts:
            self._head.prefill_ahead([request for request in prefilled if not request.undrafted], plan)

    def prepare(self, plan: DraftPlan) -> Mapping[int, float]:
        """Warm up: capture and compile for this plan. The seconds of its passes, by number of requests."""
        if self.decoder is None or not self.plans.offers(plan):
            return {}
        return self.decoder.prepare(self.plans.draft(plan))

    def reattach(self) -> None:
        """Forget the attached requests: a head was replaced, and their keys and values are the old head's.

        The new head computes them once the passes in flight have been read: see `can_follow`.
        """
        self._head.drop()

    def leave(self) -> None:
        """Forget the decoder's state of all requests: host passes follow, which make it stale."""
        assert not self._passes
        self._head.detach()
        self.shadow.clear()
        self._texts.forget(self._joined)  # requests that were only prefilled keep theirs
        self._joined.clear()

    def drop(self) -> None:
        """Forget the passes in flight: one of them failed."""
        if self.decoder is not None:
            self.decoder.drop()
        self._waiting = self._mask_failure = None
        self._passes.clear()
        self._joined.clear()
        self._texts.clear()
        self._head.drop()

    def _forget_finished(self) -> None:
        self._joined = {request: count for request, count in self._joined.items() if not request.finished}
        self._texts.forget_finished()
        self._head.forget_finished()
        self._optimistic.forget_finished()


def _decoder_or_none(make: Callable[[], AsyncDecoder | None]) -> AsyncDecoder | None:
    """The decoder; None if there is none, or no memory for it: decoding works without it."""
    try:
        return make()
    except Exception as error:
        logger.warning("passes do not overlap with the host's work, because %s", error)
        return None
