"""Engine: continuous batching with speculative decoding, one step at a time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from paceline.backends.async_decoding import AsyncDecoder
from paceline.backends.base import Backend
from paceline.constrain.compiler import GrammarCompiler
from paceline.control.controller import Controller, FixedController, Load, StepPlan
from paceline.core.detokenizer import TextTokenizer
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.stats import StepStats, TrainerActivity
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import Drafter, UnboundDrafter
from paceline.draft.grammar import GrammarDrafter
from paceline.engine.admission import Limits, RequestOptions, make_requests
from paceline.engine.drafting import FORCED_ONLY, Drafting
from paceline.engine.executors.batch import BatchBuilder
from paceline.engine.executors.device_executor import DeviceExecutor
from paceline.engine.executors.host_executor import HostExecutor
from paceline.engine.executors.verification import Verification
from paceline.engine.output_processor import Delta, OutputProcessor
from paceline.engine.overlap import OverlapScheduler
from paceline.engine.pipeline import InFlight, Pipeline, Schedule, StepTimer, failing
from paceline.engine.scheduler import Scheduler
from paceline.engine.step_recorder import StepRecorder
from paceline.errors import BackendLostError, RequestError
from paceline.kv.cache import KVCache
from paceline.verify.pathwise import verify_pathwise
from paceline.verify.verdict import Rule

__all__ = ["Delta", "Engine"]


def target_cache(
    backend: Backend,
    limits: Limits,
    num_pages: int,
    enable_prefix_caching: bool = True,
    num_window_pages: int | None = None,
) -> KVCache:
    """The KV cache of an engine, with the target's keys, values and states.

    `num_window_pages`: those of the layers with a sliding window, as size_cache gives them; None: all layers
    have the same pages.
    """
    kv = KVCache(
        num_pages, backend.page_size, limits.max_num_seqs, limits.max_model_len, enable_prefix_caching
    )
    if num_window_pages is None:
        kv.add_pool(backend, backend.attention_window)
    else:
        kv.add_grouped_pool(backend, num_window_pages, limits.max_num_batched_tokens)
    if backend.bytes_per_state:
        kv.add_states(backend)
    return kv


class Engine:
    """Serves requests with continuous batching. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: TextTokenizer,
        limits: Limits,
        kv: KVCache,
        *,
        seed: int = 0,
        controller: Controller | None = None,
        drafters: Mapping[str, Drafter] | None = None,
        plans: Mapping[str, DraftPlan] | None = None,
        rule: Rule = verify_pathwise,
        draft_forced: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`kv` is a `target_cache`, to which the drafters are bound. `drafters` and `plans` are by name."""
        self.backend = backend
        self.tokenizer = tokenizer
        self.limits = limits
        self.kv = kv
        self.scheduler = Scheduler(
            self.kv, limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len
        )
        self.stats = StepStats()  # of the last step
        self.grammars = GrammarCompiler(tokenizer, limits.vocab_size)  # any thread may use it
        self._pool = kv.pool_of(backend)
        self._seed = seed
        self._controller = controller or FixedController()
        self._drafting = Drafting(drafters or {}, limits.vocab_size, draft_forced, clock)
        self._plans = {**(plans or {}), GrammarDrafter.name: FORCED_ONLY}
        samples = backend.chooses and rule is verify_pathwise  # other rules need whole distributions
        self._processor = OutputProcessor(self.kv, clock)
        self._pipeline = Pipeline()
        self._host = HostExecutor(
            backend,
            self._pool,
            self.kv,
            BatchBuilder(limits.max_num_batched_tokens, limits.max_num_seqs, samples),
            self._drafting,
            self._controller,
            Verification(rule, limits.vocab_size),
        )
        self._device = DeviceExecutor(
            self._make_decoder if samples else _no_decoder, self._drafting, self.kv, limits.vocab_size
        )
        self._overlap = OverlapScheduler(
            self.scheduler,
            self._device,
            self._host,
            self._drafting,
            self._plan,
            overlaps_prefills=not backend.bytes_per_state,
        )
        self._next_plan: _Planned | None = None  # planned, but no pass was scheduled by it yet
        self._recorder = StepRecorder(self.scheduler, self.kv, self._drafting, self._device.shadow)
        self._clock = clock
        self._live: dict[str, list[Request]] = {}
        self._num_arrived = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def plans(self) -> Mapping[str, DraftPlan]:
        """The default plan of each drafter that requests may name."""
        return self._plans

    @property
    def active_drafter(self) -> str | None:
        """The drafter that is being called now. Any thread may read this."""
        return self._drafting.faults.active

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Request]:
        """The queued requests, one for each of the n outputs. RequestError if they cannot be served.

        Without a `grammar` the params' structured_outputs are compiled here.
        """
        if options.get("resume") is not None and params.seed is None and not params.greedy:
            raise RequestError("an output can be resumed only with its request's seed. Set seed.")
        adapter = options.get("adapter", "")
        if adapter and adapter not in self.backend.adapters:
            raise RequestError(f"there is no adapter {adapter[:80]!r}; load it with --lora-modules.")
        name = str(self._num_arrived) if request_id is None else request_id
        if name in self._live:
            raise RequestError(f"a request with id {name!r} is already running; give each its own id.")
        if options.get("grammar") is None and params.structure is not None:
            options["grammar"] = self.grammars.compile(params.structure)
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
            **options,
        )
        self._num_arrived += 1
        self._live[name] = list(children)
        for request in children:
            self.scheduler.add(request)
        return children

    def abort(self, request_id: str) -> list[Request]:
        """The unfinished requests of this id, which have ended now with reason "abort"."""
        aborted = self._live.get(request_id, [])
        for request in list(aborted):
            self._processor.end(request, "abort")
            self._remove(request)
        self._drafting.forget(aborted)
        return aborted

    def replace_head(self, name: str, drafter: UnboundDrafter) -> None:
        """Give the drafter `name` the head of `drafter`, from the next step on.

        Both are drafters of one method, see Loaded.load_head. Running requests continue: the new head's keys
        and values are computed when it next drafts for them. If the head does not fit, ConfigError, and
        nothing has changed.
        """
        self._drafting.replace_head(name, drafter)
        self._device.reattach()

    def watch_trainer(self, trainer: TrainerActivity) -> None:
        """Record for each pass whether a trainer on this machine computed beside it. For any thread."""
        self._recorder.trainer = trainer

    def prepare(self) -> None:
        """Warm up: compile and allocate everything that the first steps need. Call it before any request."""
        self.compile_ahead()
        seconds, plans = self._warm_up(), self._device_plans()
        for plan in plans:
            self._controller.expect(plan, seconds[plan], self._drafting.on_device.catch_up_seconds(plan))
        self.tokenizer.token_bytes(0)  # builds the table of all tokens
        gc.unfreeze()  # what earlier engines froze
        gc.collect()
        gc.freeze()  # else a collection between two steps would scan all loaded objects, which takes 0.25 s

    def compile_ahead(self) -> None:
        """Compile a warm-up's kernels on all cores, if the backend otherwise compiles them one by one."""
        self.backend.compile_ahead(self._warm_up)

    def _warm_up(self) -> dict[DraftPlan, Mapping[int, float]]:
        """Run passes of every kind and size over unused pages. The seconds of device passes, by requests."""
        layers, kept_features = self._drafting.feature_layers, self._drafting.kept_features
        self.backend.prepare(self._pool, self.limits.max_model_len, layers, kept_features)
        self._drafting.prepare()
        plans = dict.fromkeys([*self._device_plans(), *self._device.plans.prepared_forced])
        return {plan: self._device.prepare(plan) for plan in plans}

    def _device_plans(self) -> Sequence[DraftPlan]:
        """The plans that the controller may give to passes on the device."""
        return list(dict.fromkeys([PLAIN, *self._controller.device_plans()]))

    def close(self) -> None:
        """Stop: drafters and the controller save their state."""
        gc.unfreeze()
        self.grammars.close()
        self._drafting.close()
        self._controller.close()

    def step(self) -> list[Delta]:
        """The deltas of one pass: launch every pass that can overlap, then commit the oldest."""
        timer = StepTimer(self._clock)
        self._recorder.begin(timer.last, is_busy=len(self._pipeline) > 0)
        self._device.send_masks()  # of the pass in flight: the one before it was read in the last step
        while (schedule := self._next_schedule()) is not None:
            timer.end("plan")
            self._pipeline.append(self._begin(schedule, timer))
        timer.end("plan")
        oldest = self._pipeline.pop()
        if oldest is None:
            self.stats = self.state()
            return []
        return self._commit(oldest, timer)

    def _next_schedule(self) -> Schedule | None:
        """The next pass that can start, pages reserved; None if there is none.

        A host pass over all requests starts only when no pass is in flight. OverlapScheduler also queues host
        passes over some of them, such as prefills, behind those in flight.
        """
        schedule = self._overlap.next(self._pipeline)
        if schedule is None and not self._pipeline and self.has_unfinished:
            step_plan = self._plan(self._overlap.uses_device(self.scheduler.running))
            self._device.leave()
            parts = self.scheduler.schedule(
                self._drafting.with_forced(self.scheduler.running, step_plan.plans)
            )
            schedule = Schedule(parts, self._host, step_plan) if parts else None
        if schedule is not None and schedule.step_plan is not None:
            self._next_plan = None
        return schedule

    def _plan(self, on_device: bool) -> StepPlan:
        """The controller's plan for the next step, made once even if passes in flight delay the step."""
        running, planned = self.scheduler.running, self._next_plan
        if planned is None or planned.running != running or planned.on_device != on_device:
            step_plan = self._controller.plan(running, self._load(on_device))
            step_plan.plans = self._drafting.without_failed(running, step_plan.plans)
            self._next_plan = planned = _Planned(list(running), on_device, step_plan)
        return planned.step_plan

    def _load(self, on_device: bool) -> Load:
        scheduler = self.scheduler
        waiting, coming = len(scheduler.waiting), scheduler.num_admissible
        return Load(len(scheduler.running), waiting, coming, on_device)

    def _begin(self, schedule: Schedule, timer: StepTimer) -> InFlight:
        """Start a pass. If that fails, waiting for the pass raises the error, as it does for later ones."""
        if not schedule.executor.on_device:  # a request's first pass is its prefill, on the host
            for part in schedule.parts:
                if part.request.scheduled_time is None:
                    part.request.scheduled_time = self._clock()
        try:
            begun = schedule.executor.begin(schedule, timer)
        except Exception as error:
            return failing(schedule, error)
        if not schedule.executor.on_device and self._device.decoder is not None:
            self._device.prefill_ahead(
                schedule.parts, self._controller.coming_plan(self.scheduler.running, self._load(True))
            )
        return begun

    def _commit(self, done: InFlight, timer: StepTimer) -> list[Delta]:
        """The deltas of a pass: wait for it, advance its requests, let drafters and controller observe it."""
        try:
            result = done.wait(timer)
        except BackendLostError:  # no pass can follow: the engine ends
            raise
        except Exception as error:  # only this pass is lost
            return self._fail(self._lost_with(done), error)
        advance, lookahead = self._processor.advance, self._device.lookahead
        pairs = zip(result.parts, result.verdicts, strict=True)
        on_device = done.schedule.executor.on_device
        deltas = [advance(part, verdict, lookahead, on_device) for part, verdict in pairs]
        self._drafting.observe(result.parts, result.verdicts, result.features)
        ended = [part.request for part in result.parts if part.request.finish_reason is not None]
        for request in ended:  # only now: drafters observe requests that still hold their pages
            self._remove(request)
        self._drafting.forget(ended)
        timer.end("commit")
        self.stats = self._recorder.end(result, done.schedule, deltas, timer)
        if done.schedule.step_plan is not None:
            self._controller.observe(done.schedule.step_plan, self.stats)
        self.stats.control = self._controller.stats()
        return deltas

    def _lost_with(self, done: InFlight) -> list[Request]:
        """The requests of a lost pass, and of the passes after it that depend on its tokens."""
        lost = list(done.schedule.requests)
        if done.schedule.executor.on_device:
            lost += self._pipeline.drop_decodes()
            self._device.drop()
        return [request for request in dict.fromkeys(lost) if not request.finished]

    def _make_decoder(self) -> AsyncDecoder | None:
        states = None if self.kv.states is None else self.kv.states.pool
        return self.backend.make_async_decoder(
            self._pool,
            self.limits.max_num_seqs,
            self.limits.max_model_len,
            self._drafting.feature_layers,
            self._drafting.kept_features,
            states,
        )

    def _remove(self, request: Request) -> None:
        """Remove a request that has ended. After an error its pages do not stay in the prefix cache."""
        self.scheduler.remove(request, forget=request.error is not None)
        siblings = self._live[request.request_id]
        self._live[request.request_id] = [other for other in siblings if other is not request]
        if not self._live[request.request_id]:
            del self._live[request.request_id]

    def _fail(self, requests: Sequence[Request], error: Exception) -> list[Delta]:
        """The last deltas of the requests of a pass that raised; they end with its error."""
        for request in requests:
            self._processor.end(request, "error", error=error)
            self._remove(request)
        self._drafting.forget(requests)
        self.stats = replace(self.state(), requests=len(requests), failed=True)
        return [Delta(request, ()) for request in requests]

    def now(self) -> float:
        """The present time on the clock of the requests' times."""
        return self._clock()

    def state(self) -> StepStats:
        """The statistics of an empty step: requests and cache usage now. Any thread may read this."""
        return self._recorder.state()


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step plan, and the requests and executor that it was made for."""

    running: list[Request]
    on_device: bool
    step_plan: StepPlan


def _no_decoder() -> None:
    """No decoder, because the verification rule needs logits on the host."""
