"""Overlap (asynchronous) scheduling: the next pass that can be launched before those in flight are read.

Decode passes are launched before the previous one is read. New requests are prefilled in a separate host
pass, queued after the passes in flight, and join the decode batch once that pass has been read. While nothing
decodes, the next prefill of a burst, or the next chunk of a prompt, is launched before the first is read.
Requests that the device cannot sample, or cannot draft for as they want (shared_plan.py), decode in host
passes, while the others stay on the device. A pass over requests with token masks is launched like any other;
it waits for the masks before it samples, and the next one is launched behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.control.controller import StepPlan
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.drafting import Drafting
from paceline.engine.executors.device_executor import DeviceExecutor
from paceline.engine.pipeline import DEPTH, Executor, Pipeline, Schedule
from paceline.engine.scheduler import Scheduler
from paceline.engine.shared_plan import SharedPlan, SharedPlanner

# Start a prefill once the waiting requests have waited 0.25 passes per decoding request, at most 8 in all: a
# prefill delays every decoding request by about one pass, whether it is over one prompt or over three.
PREFILL_WAIT_PER_DECODE = 0.25  # passes
MAX_PREFILL_WAIT = 8  # passes


class OverlapScheduler:
    """Schedules passes that can start before those in flight are read."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: DeviceExecutor,
        host: Executor,
        drafting: Drafting,
        plan: Callable[[bool], StepPlan],
        overlaps_prefills: bool = True,
    ) -> None:
        """`plan` makes the next step's plan.

        Without `overlaps_prefills` each host pass is read before the next one is launched: recurrent states
        advance when a pass is read, from buffers that the next pass overwrites.
        """
        self._scheduler = scheduler
        self._device = device
        self._host = host
        self._drafting = drafting
        self._shared = SharedPlanner(device, drafting)
        self._plan = plan
        self._overlaps_prefills = overlaps_prefills
        self._waited = 0  # passes, summed over the waiting requests
        self._last_decode: tuple[list[Request], SharedPlan] = ([], SharedPlan(PLAIN, []))  # of _last_parts
        self._last_parts: list[Scheduled] = []

    def next(self, pipeline: Pipeline) -> Schedule | None:
        """The next pass, pages reserved; None if none can follow those in flight."""
        running = self._scheduler.running
        device = self._device
        if not running or pipeline.num_decodes >= DEPTH or device.decoder is None or device.waits_for_masks:
            return None
        if (prefill := self._next_prefill(pipeline)) is not None:
            return prefill
        prefill_is_due = self._count_wait(len(running))
        decoding, host_is_due = running, False
        if prefill_is_due or not pipeline.decodes(running):  # else the requests of the last pass decode on
            if not self.uses_device(running):
                return None
            on_host = pipeline.on_host
            decoding = [
                request
                for request in running
                if request.num_pending == 1 and request not in on_host and device.can_sample(request)
            ]
            host_is_due = not on_host and (prefill_is_due or len(decoding) < len(running))
            if not decoding:
                return None
        step_plan = self._plan(True)
        shared = self._shared.choose(decoding, self._plans_of(decoding, step_plan))
        if shared is None or not self._can_leave_out(shared.left_out, step_plan):
            return None
        if shared.left_out:
            decoding, host_is_due = list(shared.requests), host_is_due or not pipeline.on_host
        if host_is_due and (parts := self._host_parts(decoding, step_plan, shared.left_out)):
            return Schedule(parts, self._host)
        if not device.can_follow(shared.plan) or not (admitted := device.admit(decoding, shared.plan)):
            return None
        return Schedule(self._decode_parts(admitted, shared), device, step_plan, shared.plan)

    def _plans_of(self, requests: Sequence[Request], step_plan: StepPlan) -> Sequence[DraftPlan]:
        """The plans of these requests, which are all that run, or some of them."""
        running = self._scheduler.running
        if requests is running:
            return step_plan.plans
        planned = dict(zip(running, step_plan.plans, strict=True))
        return [planned[request] for request in requests]

    def _can_leave_out(self, left_out: Sequence[Request], step_plan: StepPlan) -> bool:
        """Whether these requests can decode in host passes beside those of the device.

        If not, the passes in flight are read first, and a host pass over all requests follows.
        """
        if not left_out:
            return True
        running = self._scheduler.running
        plans = self._plans_of(left_out, step_plan)
        return (
            self.uses_device(running, left_out)
            and not any(self._device.has_joined(request) for request in left_out)
            and not any(self._drafting.writes_target_pages(plan) for plan in plans)
        )

    def _decode_parts(self, requests: list[Request], shared: SharedPlan) -> list[Scheduled]:
        """One row and the plan for each request. Reuses the last decode pass's parts if nothing changed."""
        before, last = self._last_decode
        if requests != before or (shared.plan, shared.by_host) != (last.plan, last.by_host):
            self._last_decode = requests, shared
            self._last_parts = [
                Scheduled(request, 1, self._shared.part_plan(request, shared)) for request in requests
            ]
        return self._last_parts

    def _next_prefill(self, pipeline: Pipeline) -> Schedule | None:
        """The next chunks of the prompts in flight, and of waiting requests; None if a request decodes.

        They need no token that the pass in flight samples. So the device does not wait for the host between
        the chunks of a long prompt, or between the prefills of a burst. A request that decodes in the pass in
        flight, on the host, takes part in the next one too, which therefore waits for its token.
        """
        running = self._scheduler.running
        if len(pipeline) != 1 or self._device.needs_features or not self._overlaps_prefills:
            return None
        in_flight = pipeline.on_host
        for request in running:
            decodes = request.num_pending == 1 and request.num_output > 0
            if decodes or request not in in_flight:
                return None
        has_chunks = any(end < len(request.token_ids) for request, end in in_flight.items())
        if not has_chunks and not self._scheduler.waiting:
            return None
        parts = self._scheduler.schedule([PLAIN] * len(running), in_flight=in_flight)
        return Schedule(parts, self._host) if parts else None

    def uses_device(self, requests: Sequence[Request], left_out: Sequence[Request] = ()) -> bool:
        """Whether the device can sample the next tokens of most of these requests. Those in `left_out` count
        as if it could not.

        The others are sampled in host passes, which alternate with device passes and wait for them. If most
        requests need the host, host passes for all are faster.
        """
        if self._device.decoder is None:
            return False
        on_device = [request for request in requests if self._device.can_sample(request)]
        return 2 * sum([request not in left_out for request in on_device]) > len(requests)

    def _count_wait(self, decoding: int) -> bool:
        """Count one more pass for each waiting request; whether they have now waited long enough."""
        admissible = self._scheduler.num_admissible
        self._waited = self._waited + admissible if admissible else 0
        if not admissible or self._waited < min(PREFILL_WAIT_PER_DECODE * decoding, MAX_PREFILL_WAIT):
            return False
        self._waited = 0
        return True

    def _host_parts(
        self, on_device: Sequence[Request], step_plan: StepPlan, left_out: Sequence[Request]
    ) -> list[Scheduled]:
        """The parts of a host pass over all other requests: prefills, and tokens that the host samples.

        Requests in `left_out` get the drafts that they want. The others are drafted for only from texts: a
        head runs on the device after the passes in flight, and the host would wait.
        """
        running, drafting = self._scheduler.running, self._drafting
        plans = []
        for request, plan in zip(running, step_plan.plans, strict=True):
            if request.num_pending > 1:
                plans.append(PLAIN)
                continue
            has_drafts = request in left_out or drafting.only_reads_texts(plan)
            plans += drafting.with_forced([request], [plan if has_drafts else PLAIN])
        return self._scheduler.schedule(plans, set(on_device))
