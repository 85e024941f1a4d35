"""StepRecorder: the StepStats of every step, from its pass and from what the engine's parts have counted."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.stats import StepStats, TrainerActivity
from paceline.engine.drafting import Drafting
from paceline.engine.executors.shadow import ShadowDrafts
from paceline.engine.output_processor import Delta
from paceline.engine.pipeline import Schedule, StepResult, StepTimer
from paceline.engine.scheduler import Scheduler
from paceline.engine.step_stats import add_pass
from paceline.kv.cache import KVCache


class StepRecorder:
    """Records steps."""

    def __init__(self, scheduler: Scheduler, kv: KVCache, drafting: Drafting, shadow: ShadowDrafts) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._drafting = drafting
        self._shadow = shadow
        self.trainer: TrainerActivity | None = None  # that may compute on the same device
        self._counted = (0, 0)  # preemptions and failures of drafters that earlier steps have reported
        self._ended = 0.0  # time at which the last step with a pass ended
        self._between = 0.0  # seconds from there to this step, if a pass was in flight

    def begin(self, now: float, is_busy: bool) -> None:
        """A step begins. `is_busy`: a pass is in flight."""
        self._between = now - self._ended if is_busy else 0.0

    def state(self) -> StepStats:
        """The statistics of an empty step: requests and cache usage now. Any thread may call this."""
        return StepStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_usage=self._kv.usage,
            prefix_queries=self._kv.prefix_queries,
            prefix_hits=self._kv.prefix_hits,
        )

    def end(
        self, result: StepResult, schedule: Schedule, deltas: Sequence[Delta], timer: StepTimer
    ) -> StepStats:
        """The statistics of a step that has committed a pass."""
        self._ended = timer.last
        stats = self.state()
        stats.rows, stats.attended = result.num_rows, result.attended
        stats.overlapped, stats.between_time = schedule.executor.on_device, self._between
        stats.plan = schedule.plan if stats.overlapped else None
        gained = [len(delta.token_ids) for delta in deltas]
        add_pass(stats, result.parts, result.shapes, result.verdicts, result.paths, gained, timer.seconds)
        stats.draft_calls, stats.shadow = self._drafting.take_calls(), self._shadow.take()
        if self.trainer is not None:  # a device pass was launched one step earlier, so look back two steps
            seconds = stats.total_time * (2 if stats.overlapped else 1)
            stats.disturbed = self.trainer.is_working(seconds)
        preemptions, failures = self._counted
        self._counted = self._scheduler.num_preemptions, self._drafting.faults.count
        stats.preemptions, stats.draft_failures = self._counted[0] - preemptions, self._counted[1] - failures
        return stats
