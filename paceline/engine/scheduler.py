"""Scheduler: the requests of the next pass, and the rows of each.

First come, first served. A decoding request always gets its row, prefill chunks share the remaining rows in
order of arrival, drafts get the rest. A request is admitted when all its tokens fit. Only a request that
resumes another replica's output overtakes others in the queue, so a large one cannot starve. When pages run
out, the youngest request is preempted and computed again later, so the oldest always advances.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from paceline.core.request import Request, Status
from paceline.core.schedule import Scheduled
from paceline.core.trees import DraftPlan
from paceline.kv.cache import KVCache

NONE_IN_FLIGHT: Mapping[Request, int] = MappingProxyType({})
PROMPT_LOGPROB_ROWS = 64  # rows of a prefill chunk whose logits (one vocabulary per row) are needed


class Scheduler:
    """Owns the queue and the running list, both in order of arrival."""

    def __init__(
        self, kv: KVCache, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._max_rows = max_num_batched_tokens
        self._max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0  # since the start

    def add(self, request: Request) -> None:
        """Queue a request. A resumed one, which has output from another replica, goes before new ones."""
        begun = sum(other.num_output > 0 for other in self.waiting) if request.num_output else None
        self.waiting.insert(len(self.waiting) if begun is None else begun, request)

    def remove(self, request: Request, forget: bool = False) -> None:
        """Remove a running or waiting request. `forget`: its pages must not stay in the prefix cache."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._kv.release(request.slot, forget)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.slot = -1
        request.status = Status.FINISHED

    @property
    def num_admissible(self) -> int:
        """The number of waiting requests for which slots are free; pages are not checked."""
        return min(len(self.waiting), self._max_num_seqs - len(self.running))

    def schedule(
        self,
        plans: Sequence[DraftPlan],
        resting: Collection[Request] = frozenset(),
        in_flight: Mapping[Request, int] = NONE_IN_FLIGHT,
    ) -> list[Scheduled]:
        """The parts of the next pass, pages reserved. `plans` are those of the running requests.

        A plan's budget may be shrunk, never raised. Requests in `resting` are left out. Those `in_flight`
        will have computed this number of tokens when the pass is run: they get their next prefill chunk.
        """
        allowed = dict(zip(self.running, plans, strict=True))
        out = {*resting, *in_flight}
        decoding = sum(request.num_pending == 1 and request not in out for request in self.running)
        prefill_rows = self._max_rows - decoding
        parts: list[Scheduled] = []
        for request in list(self.running):
            if request.status is not Status.RUNNING:  # preempted by an older one
                continue
            if request in resting:
                continue
            start = in_flight.get(request, request.num_computed)
            tokens = 1 if request.num_pending == 1 else self._chunk(request, start, prefill_rows)
            if tokens == 0 or start == len(request.token_ids):
                continue
            if not self._reserve_or_preempt(request, start + tokens, may_preempt=not out):
                break  # it was preempted itself, or waits until no pass is in flight
            if request.num_pending > 1:
                prefill_rows -= tokens
            parts.append(Scheduled(request, tokens, allowed[request], start))
        else:
            if len(self.running) == len(allowed):  # nothing was preempted
                self._admit(parts, prefill_rows)
        self._shrink_drafts(parts)
        return parts

    def _chunk(self, request: Request, start: int, rows: int) -> int:
        """The number of tokens that a request computes from token `start` on, given the free rows."""
        limit = PROMPT_LOGPROB_ROWS if request.wants_prompt_logprobs else rows
        return min(len(request.token_ids) - start, rows, limit)

    def _reserve_or_preempt(self, request: Request, length: int, may_preempt: bool) -> bool:
        """Whether the request has pages for `length` tokens; preempts the youngest requests if needed.

        Nothing is preempted while passes are in flight: they write to the pages of their requests.
        """
        while not self._kv.reserve(request.slot, length):
            if not may_preempt:
                return False
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Move a running request back to the queue. It keeps its tokens; its KV is computed again."""
        self.running.remove(request)
        self._kv.release(request.slot)
        request.slot, request.num_computed = -1, 0
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)  # it is older than all in the queue

    def _admit(self, parts: list[Scheduled], rows: int) -> None:
        """Start waiting requests, in order, as long as slots, rows and pages last."""
        while self.waiting and rows > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if self._should_wait_for_leader(request):
                break
            opened = self._kv.open(
                request.token_ids,
                request.cache_salt,
                reuse=not request.wants_prompt_logprobs,
                first_rows=self._chunk(request, 0, rows),
            )
            if opened is None:
                break
            self.waiting.popleft()
            request.slot, request.num_computed = opened
            if request.num_preemptions == 0:
                request.num_cached_tokens = min(request.num_computed, len(request.prompt_token_ids))
            request.status = Status.RUNNING
            insort(self.running, request, key=lambda running: running.arrival_order)
            tokens = self._chunk(request, request.num_computed, rows)
            rows -= tokens
            parts.append(Scheduled(request, tokens, start=request.num_computed))

    def _should_wait_for_leader(self, request: Request) -> bool:
        """Whether child 0 is still prefilling prompt pages that this request could share."""
        leader = request.leader
        if leader is None or not self._kv.enable_prefix_caching:
            return False
        prompt = len(request.prompt_token_ids)
        shares = prompt > self._kv.page_size
        return shares and leader.status is Status.RUNNING and leader.num_computed < prompt

    def _shrink_drafts(self, parts: list[Scheduled]) -> None:
        """Fit the plans into the rows, pages and context that are left, in order of arrival."""
        rows = self._max_rows - sum(part.num_tokens for part in parts)
        for part in parts:
            if part.plan.budget == 0:
                continue
            request = part.request
            committed = part.start + part.num_tokens
            useful = request.max_output - request.num_output - 1  # the bonus token comes on top
            budget = min(part.plan.budget, rows, self._max_model_len - committed)
            if part.plan.branching == 1:
                budget = min(budget, useful)
            if not part.reaches_end or useful <= 0:
                budget = 0
            while budget > 0 and not self._kv.reserve(request.slot, committed + budget):
                budget -= 1
            part.plan = part.plan.shrunk(max(budget, 0))
            if 0 < useful < part.plan.levels:
                part.plan = replace(part.plan, depth=useful)
            rows -= part.plan.budget
