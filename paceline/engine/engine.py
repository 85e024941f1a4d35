"""The engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.backends.ahead import AheadDecoder
from paceline.backends.base import Backend
from paceline.constrain.compiler import Grammar, GrammarCompiler, GrammarTokenizer
from paceline.control.controller import Controller, FixedController, Load
from paceline.core.features import Features
from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.stats import StepStats
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.core.verdict import Verdict
from paceline.draft.base import Drafter
from paceline.draft.grammar import GrammarDrafter
from paceline.engine.admission import Limits, make_requests
from paceline.engine.advancing import Advancing, Delta
from paceline.engine.ahead import RunAhead
from paceline.engine.batch import BatchBuilder
from paceline.engine.drafting import FORCED_ONLY, Drafting, features_of
from paceline.engine.facts import add_facts, shapes_of
from paceline.engine.flight import PromptPass
from paceline.engine.scheduler import Scheduler
from paceline.engine.verification import Verification
from paceline.errors import RequestError
from paceline.kv.cache import KVCache
from paceline.verify.pathwise import verify_pathwise
from paceline.verify.verdict import Rule

__all__ = ["Delta", "Engine"]


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
        self.grammars = GrammarCompiler(tokenizer, limits.vocab_size)  # any thread may use it
        self._pool = self.kv.add_pool(backend)
        self._seed = seed
        self._controller = controller or FixedController()
        self._drafting = Drafting(drafters or {}, limits.vocab_size, self.kv, draft_forced, clock)
        self._plans = {**(plans or {}), GrammarDrafter.name: FORCED_ONLY}
        self._choosing = backend.chooses and rule is verify_pathwise  # other rules need whole distributions
        self._builder = BatchBuilder(limits.max_num_batched_tokens, limits.max_num_seqs, self._choosing)
        trims = type(self._controller).trim is not Controller.trim
        self._ahead = RunAhead(self._make_decoder, self._drafting, self.kv, trims)
        self._kept_plans: dict[Request, DraftPlan] = {}  # that passes in flight have delayed
        self._verification = Verification(rule, limits.vocab_size)
        self._advancing = Advancing(self.kv, clock)
        self._clock = clock
        self._live: dict[str, list[Request]] = {}
        self._num_arrived = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def asked_drafter(self) -> str | None:
        """The drafter that the engine's thread is in now; any thread may ask."""
        return self._drafting.asked

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        segment: str = "",
        cache_salt: str = "",
        grammar: Grammar | None = None,
    ) -> list[Request]:
        """The queued requests, one for each of the n outputs. RequestError if it cannot be served.

        `segment` names the kind of traffic, for statistics. Only requests of the same `cache_salt`
        share pages of the prefix cache and past responses to draft from. `grammar` is what the params'
        structured_outputs were compiled to; if it is left out, they are compiled here.
        """
        name = str(self._num_arrived) if request_id is None else request_id
        if name in self._live:
            raise RequestError(f"a request with id {name!r} is already running; give each its own id.")
        if grammar is None and params.structure is not None:
            grammar = self.grammars.compile(params.structure)
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
            grammar=grammar,
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
            self._advancing.end(request, "abort")
            self._remove(request)
        self._drafting.forget(aborted)
        return aborted

    def prepare(self) -> None:
        """Have ready what the first passes would wait for. Nothing has been added yet."""
        layers, kept = self._drafting.feature_layers, self._drafting.kept
        self.backend.prepare(self._pool, self.limits.max_model_len, layers, kept)
        self._drafting.prepare()
        self.tokenizer.token_bytes(0)  # makes the table of all
        for plan in dict.fromkeys([PLAIN, *self._controller.plans_ahead()]):
            self._controller.expect(plan, self._ahead.prepare(plan))
        gc.unfreeze()  # engines that are gone
        gc.collect()
        gc.freeze()  # to look through all that was loaded takes a quarter of a second, between any two steps

    def close(self) -> None:
        """End: what drafters and the controller keep on disk is written."""
        gc.unfreeze()
        self.grammars.close()
        self._drafting.close()
        self._controller.close()

    def step(self) -> list[Delta]:
        """What one pass over the model adds to the requests in it."""
        times = [self._clock()]
        if self._ahead.is_offered and self._runs_ahead():
            return self._step_ahead(times)
        plans = self._plan()
        self._ahead.leave()
        before = (self.scheduler.num_preemptions, self._drafting.failures)
        parts = self.scheduler.schedule(plans)
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
            batch = self._build(parts, trees)
            times.append(self._clock())
            begun = self.backend.begin(batch)
            self._ahead.foresee(parts)
            output = begun()
        except Exception as error:  # the pass is lost, the engine is not
            return self._fail([part.request for part in parts], error)
        deltas = self._finish(parts, trees, batch, output, times)
        self.stats.preemptions = self.scheduler.num_preemptions - before[0]
        self.stats.draft_calls = tuple(self._drafting.calls)
        self.stats.draft_failures = self._drafting.failures - before[1]
        if not self.stats.failed:
            self._ahead.observe(self.stats)
            self._controller.observe(self.stats)
            self.stats.control = self._controller.facts()
        return deltas

    def _finish(
        self,
        parts: list[Scheduled],
        trees: DraftTrees | None,
        batch: ForwardBatch,
        output: ForwardOutput,
        times: list[float],
    ) -> list[Delta]:
        """What a pass that was just waited for adds to its requests. `stats` has its facts then."""
        times.append(self._clock())
        try:
            verdicts = self._verification.verdicts(parts, trees, output)
        except Exception as error:
            return self._fail([part.request for part in parts], error)
        times.append(self._clock())
        attended, features = int(np.diff(batch.row_offsets) @ batch.context_lengths), None
        if output.features is not None:
            features = features_of(parts, batch, output.features)
        left = [index for index, part in enumerate(parts) if not part.request.finished]
        if len(left) < len(parts):  # some were aborted meanwhile
            parts, verdicts = [parts[index] for index in left], [verdicts[index] for index in left]
            features = None if features is None else features.of_requests(left)
        deltas = self._take(parts, verdicts, features)
        times.append(self._clock())
        self.stats = self.state()
        gained = [len(delta.token_ids) for delta in deltas]
        add_facts(self.stats, parts, shapes_of(trees), verdicts, gained, batch.num_rows, attended, times)
        return deltas

    def _build(self, parts: Sequence[Scheduled], trees: DraftTrees | None) -> ForwardBatch:
        layers, kept = self._drafting.feature_layers, self._drafting.kept
        return self._builder.build(parts, trees, self.kv, self._pool, layers, kept)

    def _make_decoder(self) -> AheadDecoder | None:
        limits, layers, kept = self.limits, self._drafting.feature_layers, self._drafting.kept
        return self.backend.decode_ahead(self._pool, limits.max_num_seqs, limits.max_model_len, layers, kept)

    def _plan(self) -> list[DraftPlan]:
        """The plans of the running requests: new ones, or those that passes in flight have delayed."""
        running, kept = self.scheduler.running, self._kept_plans
        self._kept_plans = {}
        if kept and list(kept) == running:
            return list(kept.values())
        load = Load(len(running), len(self.scheduler.waiting), self.scheduler.num_admissible)
        plans = self._controller.plan(running, load)
        return self._drafting.settled(running, plans)

    def _runs_ahead(self) -> bool:
        """Begin what can begin behind the passes in flight; whether there is one to read."""
        has_pass, running = self._ahead.has_pass(), self.scheduler.running
        if not self._choosing or not running:
            return has_pass
        coming, decoding = self.scheduler.num_admissible, running
        comes = self._ahead.are_enough(coming, len(running))
        if comes or not self._ahead.holds(running):
            computing = self._ahead.computing
            decoding = [
                request for request in running if request.num_pending == 1 and request not in computing
            ]
            comes = not computing and (comes or len(decoding) < len(running))
            keeps = self.backend.keeps_ahead
            if not decoding or not all(own.races or (keeps and own.races_among_kept) for own in decoding):
                return has_pass
        plans = self._plan()
        planned = dict(zip(running, plans, strict=True))
        plan = next((planned[request] for request in decoding if not request.undrafted), PLAIN)
        alike = all(own.undrafted or planned[own] is plan or planned[own] == plan for own in decoding)
        goes_on = alike and self._ahead.offers(plan)
        if comes and goes_on:
            self._begin_prompts(decoding)
        goes_on = goes_on and self._ahead.launch(decoding, plan)
        has_pass = self._ahead.has_pass()
        if not (has_pass and goes_on):
            self._kept_plans = planned
        return has_pass

    def _begin_prompts(self, decoding: Sequence[Request]) -> None:
        """Begin a pass over the prompts of those who have come, behind the passes in flight."""
        plans = [PLAIN] * len(self.scheduler.running)
        parts = self.scheduler.schedule(plans, set(decoding))
        if not parts:
            return
        self._note_start(parts)
        batch = self._build(parts, None)
        try:
            output = self.backend.begin(batch)
        except Exception as error:
            output = _raising(error)  # whoever waits for the pass is told
        self._ahead.add_prompts(PromptPass(parts, batch, output))
        self._ahead.foresee(parts)

    def _step_ahead(self, times: list[float]) -> list[Delta]:
        """What the oldest pass in flight adds to the requests in it."""
        times += [self._clock()] * 4  # launching was all that there is to plan, and drafting is in the pass
        prompts = self._ahead.take_prompts()
        if prompts is not None:
            return self._end_prompts(prompts, times)
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
        add_facts(self.stats, done.parts, done.shapes, done.verdicts, gained, done.num_rows, attended, times)
        self.stats.ahead = True
        self._ahead.observe(self.stats)
        if not self._kept_plans:  # else the controller has planned another step already
            self._controller.observe(self.stats)
        self.stats.control = self._controller.facts()
        return deltas

    def _end_prompts(self, prompts: PromptPass, times: list[float]) -> list[Delta]:
        """What a pass over prompts adds to those of them that are still there."""
        parts = [part for part in prompts.parts if not part.request.finished]
        try:
            output = prompts.output()
        except Exception as error:  # the pass is lost, those behind it are not
            return self._fail([part.request for part in parts], error)
        deltas = self._finish(prompts.parts, None, prompts.batch, output, times)
        self.stats.control = self._controller.facts()
        return deltas

    def _take(
        self, parts: Sequence[Scheduled], verdicts: Sequence[Verdict], features: Features | None
    ) -> list[Delta]:
        """Give the requests of a pass their tokens, show it to the drafters, and let go of who has ended."""
        room, advance = self._ahead.room, self._advancing.advance
        deltas = [advance(part, verdict, room) for part, verdict in zip(parts, verdicts, strict=True)]
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

    def _note_start(self, parts: Sequence[Scheduled]) -> None:
        """Write down when requests take part in their first pass."""
        for part in parts:
            if part.request.scheduled_time is None:
                part.request.scheduled_time = self._clock()

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
            self._advancing.end(request, "error", error=error)
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


def _raising(error: Exception) -> Callable[[], ForwardOutput]:
    """A pass that was lost when it was to begin."""

    def output() -> ForwardOutput:
        raise error

    return output
