"""The engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.backends.base import AheadDecoder, AheadDraft, Backend
from paceline.constrain.compiler import GrammarCompiler, GrammarTokenizer
from paceline.constrain.drafter import GrammarDrafter
from paceline.control.controller import Controller, FixedController, Load
from paceline.draft.base import Drafter, Features
from paceline.draft.trees import PLAIN, DraftPlan, DraftTrees
from paceline.engine.admission import Limits, make_requests
from paceline.engine.ahead import RunAhead
from paceline.engine.batch import BatchBuilder
from paceline.engine.drafting import FORCED_ONLY, Drafting, features_of
from paceline.engine.facts import add_facts
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduled, Scheduler
from paceline.engine.stats import StepStats
from paceline.engine.verification import Verification
from paceline.errors import RequestError
from paceline.kv.cache import KVCache
from paceline.verify.params import SamplingParams
from paceline.verify.pathwise import verify_pathwise
from paceline.verify.verdict import Rule, Verdict


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one request."""

    request: Request
    text: str  # may be empty while characters or stop strings are incomplete
    token_ids: tuple[int, ...]


class Engine:
    """Serves requests with continuous batching. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: GrammarTokenizer,
        limits: Limits,
        *,
        num_pages: int,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        controller: Controller | None = None,
        drafters: Mapping[str, Drafter] | None = None,
        plans: Mapping[str, DraftPlan] | None = None,
        rule: Rule = verify_pathwise,
        draft_forced: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.limits = limits
        self.kv = KVCache(
            num_pages, backend.page_size, limits.max_num_seqs, limits.max_model_len, enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.kv, limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len
        )
        self.stats = StepStats()  # of the last step
        self.grammars = GrammarCompiler(tokenizer, limits.vocab_size)  # any thread may fill its cache
        self._pool = self.kv.add_pool(backend)
        self._seed = seed
        self._controller = controller or FixedController()
        self._drafting = Drafting(drafters or {}, limits.vocab_size, self.kv, draft_forced, clock)
        self._plans = {**(plans or {}), GrammarDrafter.name: FORCED_ONLY}
        self._choosing = backend.chooses and rule is verify_pathwise  # other rules need whole distributions
        self._builder = BatchBuilder(limits.max_num_batched_tokens, limits.max_num_seqs, self._choosing)
        self._ahead = RunAhead(self._make_decoder, self._drafting, self.kv)
        self._kept_plans: dict[Request, DraftPlan] = {}  # that passes in flight have delayed
        self._verification = Verification(rule, limits.vocab_size)
        self._clock = clock
        self._live: dict[str, list[Request]] = {}
        self._num_arrived = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        segment: str = "",
        cache_salt: str = "",
    ) -> list[Request]:
        """The queued requests, one for each of the n outputs. RequestError if it cannot be served.

        `segment` names the kind of traffic, for statistics. Only requests of the same `cache_salt`
        share pages of the prefix cache.
        """
        name = str(self._num_arrived) if request_id is None else request_id
        if name in self._live:
            raise RequestError(f"a request with id {name!r} is already running; give each its own id.")
        structure = params.structure
        children = make_requests(
            name,
            self._num_arrived,
            prompt_token_ids,
            params,
            limits=self.limits,
            tokenizer=self.tokenizer,
            engine_seed=self._seed,
            pool_tokens=self.kv.pages.num_pages * self.kv.page_size,
            now=self._clock(),
            plans=self._plans,
            grammar=None if structure is None else self.grammars.compile(structure),
            segment=segment,
            cache_salt=cache_salt,
        )
        self._num_arrived += 1
        self._live[name] = list(children)
        for request in children:
            self.scheduler.add(request)
        return children

    def abort(self, request_id: str) -> list[Request]:
        """The requests of this id that were still unfinished and are now ended with reason "abort"."""
        aborted = self._live.get(request_id, [])
        for request in list(aborted):
            self._end(request, "abort")
            self._remove(request)
        self._drafting.forget(aborted)
        return aborted

    def prepare(self) -> None:
        """Have ready what the first passes would wait for. Nothing has been added yet."""
        self.backend.prepare(self._pool, self.limits.max_model_len, self._drafting.feature_layers)
        for plan in {PLAIN: None, **dict.fromkeys(self._controller.plans_ahead())}:
            self._controller.expect(plan, self._ahead.prepare(plan))

    def close(self) -> None:
        """End: what drafters and the controller keep on disk is written."""
        self._drafting.close()
        self._controller.close()

    def step(self) -> list[Delta]:
        """What one pass over the model adds to the requests in it."""
        times = [self._clock()]
        if self._ahead.has_pass() and not self._is_steady():
            return self._step_ahead(times)  # what came up waits until the passes in flight are read

        plans = self._plan()
        if self._ahead.is_offered and self._runs_ahead(plans):
            return self._step_ahead(times)
        before = (self.scheduler.num_preemptions, self._drafting.failures)
        parts = self.scheduler.schedule(plans, self._resting(plans))
        if not parts:
            self.stats = self.state()
            return []
        self._note_start(parts)
        times.append(self._clock())
        try:
            trees, parts = self._drafting.propose(parts)
            times.append(self._clock())
            trees = self._trimmed(parts, trees)
            times.append(self._clock())
            batch = self._builder.build(parts, trees, self.kv, self._pool, self._drafting.feature_layers)
            times.append(self._clock())
            output = self.backend.forward(batch)
            times.append(self._clock())
            verdicts = self._verification.verdicts(parts, trees, output)
            times.append(self._clock())
        except Exception as error:  # the pass is lost, the engine is not
            return self._fail([part.request for part in parts], error)
        attended = int(np.diff(batch.row_offsets) @ batch.context_lengths)
        deltas = self._take(parts, verdicts, features_of(parts, batch, output))
        times.append(self._clock())

        self.stats = self.state()
        gained = [len(delta.token_ids) for delta in deltas]
        add_facts(self.stats, parts, trees, verdicts, gained, batch.num_rows, attended, times)
        self.stats.preemptions = self.scheduler.num_preemptions - before[0]
        self.stats.draft_calls = tuple(self._drafting.calls)
        self.stats.draft_failures = self._drafting.failures - before[1]
        self._controller.observe(self.stats)
        self.stats.control = self._controller.facts()
        return deltas

    def _make_decoder(self, draft: AheadDraft | None) -> AheadDecoder | None:
        limits, layers = self.limits, self._drafting.feature_layers
        return self.backend.decode_ahead(self._pool, limits.max_num_seqs, limits.max_model_len, layers, draft)

    def _plan(self) -> list[DraftPlan]:
        """The plans of the running requests: new ones, or those that passes in flight have delayed."""
        running, kept = self.scheduler.running, self._kept_plans
        self._kept_plans = {}
        if kept and list(kept) == running:
            return list(kept.values())
        plans = self._controller.plan(running, Load(len(running), len(self.scheduler.waiting)))
        return self._drafting.settled(running, plans)

    def _is_steady(self) -> bool:
        """Whether all requests merely go on, and none of them needs the host for it."""
        running = self.scheduler.running
        if self.scheduler.may_admit or not running or not self._choosing:
            return False
        return self._ahead.holds(running) or all(
            request.num_pending == 1 and request.races for request in running
        )

    def _runs_ahead(self, plans: Sequence[DraftPlan]) -> bool:
        """Whether a pass is in flight; more are begun if this goes on as it is."""
        running = self.scheduler.running
        alike = self._is_steady() and all(plan == plans[0] for plan in plans)
        goes_on = alike and self._ahead.launch(running, plans[0])
        if self._ahead.has_pass():
            if not goes_on:
                self._kept_plans = dict(zip(running, plans, strict=True))
            return True
        return False

    def _resting(self, plans: Sequence[DraftPlan]) -> set[Request]:
        """Those who take no part in the pass to come: they run ahead while others compute prompts."""
        if not self._ahead.is_offered:
            return set()
        resting = self._ahead.resting(self.scheduler.running, plans)
        if resting:
            self._ahead.launch(resting, self._ahead.plan, depth=1)
        if not self._ahead.has_pass():  # also if there was no room for one
            self._ahead.leave()
            return set()
        return set(resting)

    def _step_ahead(self, times: list[float]) -> list[Delta]:
        """What the oldest pass in flight adds to the requests in it."""
        times += [self._clock()] * 4  # launching was all that there is to plan, and drafting is in the pass
        try:
            done = self._ahead.read()
        except Exception as error:  # the passes in flight are lost, the engine is not
            return self._fail(self._ahead.drop(), error)
        times += [self._clock()] * 2
        attended = done.attended
        deltas = self._take(done.parts, done.verdicts, done.features)
        times.append(self._clock())
        self.stats = self.state()
        gained = [len(delta.token_ids) for delta in deltas]
        add_facts(self.stats, done.parts, done.trees, done.verdicts, gained, done.num_rows, attended, times)
        self.stats.ahead = True
        if not self._kept_plans:  # else the controller has planned another step already
            self._controller.observe(self.stats)
        self.stats.control = self._controller.facts()
        return deltas

    def _take(
        self, parts: Sequence[Scheduled], verdicts: Sequence[Verdict], features: Features | None
    ) -> list[Delta]:
        """Give the requests of a pass their tokens, show it to the drafters, and let go of who has ended."""
        deltas = [self._advance(part, verdict) for part, verdict in zip(parts, verdicts, strict=True)]
        self._drafting.observe(parts, verdicts, features)
        ended = [part.request for part in parts if part.request.finish_reason is not None]
        for request in ended:  # only now: drafters observe requests that still hold their pages
            self._remove(request)
        self._drafting.forget(ended)
        return deltas

    def _trimmed(self, parts: Sequence[Scheduled], trees: DraftTrees | None) -> DraftTrees | None:
        """What the controller leaves of the trees."""
        if trees is None:
            return None
        trimmed = self._controller.trim(parts, trees)
        return trimmed if trimmed.num_nodes else None

    def _advance(self, part: Scheduled, verdict: Verdict) -> Delta:
        """Give a request its tokens, keep their keys and values, and end it where it must end."""
        request = part.request
        if verdict.error is not None:
            self._end(request, "error", error=verdict.error)
            return Delta(request, request.detokenizer.take(), ())
        reason: str | None = None
        taken = 0
        for token in verdict.tokens:
            taken += 1
            reason = self._take_token(request, token)
            if reason is not None:
                break
        if verdict.logprobs:
            request.logprobs.extend(verdict.logprobs[:taken])
        kept = [part.num_tokens + node for node in verdict.accepted[:taken]]
        self.kv.commit(request.slot, request.token_ids, part.num_tokens, kept, self._ahead.room)
        request.num_computed += part.num_tokens + len(kept)
        if reason is not None:
            self._end(request, reason)
        return Delta(request, request.detokenizer.take(), verdict.tokens[:taken])

    def _note_start(self, parts: Sequence[Scheduled]) -> None:
        """Write down when requests take part in their first pass."""
        for part in parts:
            if part.request.scheduled_time is None:
                part.request.scheduled_time = self._clock()

    def _take_token(self, request: Request, token: int) -> str | None:
        """Append one token; why the request ends with it, if it does."""
        request.token_ids.append(token)
        num_output = request.num_output
        if num_output == 1:
            request.first_token_time = self._clock()
        if token in request.ending_ids:
            if request.params.include_stop_str_in_output:
                request.detokenizer.append(token, num_output)
            if token in request.params.stop_ids:
                request.stop_reason = token
            return "stop"
        stop = request.detokenizer.append(token, num_output)
        if stop is not None:
            request.stop_reason = stop
            return "stop"
        return "length" if num_output >= request.max_output else None

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """Decide that a request goes on no longer. `_remove` follows in the same step."""
        request.finish_reason = reason
        request.error = error
        request.finished_time = self._clock()
        request.detokenizer.finish()

    def _remove(self, request: Request) -> None:
        """Take out a request that ended. After an error its keys and values are not offered to others."""
        self.scheduler.remove(request, forget=request.error is not None)
        siblings = self._live[request.request_id]
        self._live[request.request_id] = [other for other in siblings if other is not request]
        if not self._live[request.request_id]:
            del self._live[request.request_id]

    def _fail(self, requests: Sequence[Request], error: Exception) -> list[Delta]:
        """End the requests of a pass that raised."""
        for request in requests:
            self._end(request, "error", error=error)
            self._remove(request)
        self._drafting.forget(requests)
        self.stats = replace(self.state(), requests=len(requests), failed=True)
        return [Delta(request, request.detokenizer.take(), ()) for request in requests]

    def state(self) -> StepStats:
        """The facts of a step in which nothing happened: how things are now. Any thread may ask."""
        return StepStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_usage=self.kv.usage,
            prefix_queries=self.kv.prefix_queries,
            prefix_hits=self.kv.prefix_hits,
        )
