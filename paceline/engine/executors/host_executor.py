"""HostExecutor: passes whose drafts are made and verified on the host."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.backends.base import Backend
from paceline.control.controller import Controller
from paceline.core.features import Features
from paceline.core.forward import ForwardBatch, ForwardOutput, KVPool
from paceline.core.schedule import Scheduled
from paceline.core.trees import DraftTrees
from paceline.engine.drafting import Drafting
from paceline.engine.executors.batch import BatchBuilder
from paceline.engine.executors.verification import Verification
from paceline.engine.pipeline import InFlight, Schedule, StepResult, StepTimer
from paceline.engine.step_stats import shapes_of
from paceline.kv.cache import KVCache


class HostExecutor:
    """A pass on the host: propose -> trim -> build -> forward -> verify."""

    on_device = False

    def __init__(
        self,
        backend: Backend,
        pool: KVPool,
        kv: KVCache,
        builder: BatchBuilder,
        drafting: Drafting,
        controller: Controller,
        verification: Verification,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._kv = kv
        self._builder = builder
        self._drafting = drafting
        self._controller = controller
        self._verification = verification

    def begin(self, schedule: Schedule, timer: StepTimer) -> InFlight:
        """Draft, and start the pass that verifies the drafts. Prefill passes have no drafts."""
        trees, parts = self._drafting.propose(schedule.parts)
        timer.end("draft")
        if trees is not None and schedule.step_plan is not None:
            trees = self._controller.trim(schedule.step_plan, parts, trees)
        if trees is not None and not trees.num_nodes:
            trees = None
        timer.end("plan")
        layers, kept_features = self._drafting.feature_layers, self._drafting.kept_features
        batch = self._builder.build(parts, trees, self._kv, self._pool, layers, kept_features)
        attended = int((batch.row_offsets[1:] - batch.row_offsets[:-1]) @ batch.context_lengths)
        timer.end("build")
        output = self._backend.begin(batch)
        timer.end("forward")  # most backends compute here; the others in `wait`

        def wait(timer: StepTimer) -> StepResult:
            computed = output()
            timer.end("forward")
            result = self._verified(parts, trees, batch, attended, computed)
            timer.end("verify")
            return result

        return InFlight(schedule, wait, skip=lambda: None)

    def _verified(
        self,
        parts: list[Scheduled],
        trees: DraftTrees | None,
        batch: ForwardBatch,
        attended: int,
        output: ForwardOutput,
    ) -> StepResult:
        """The result of a pass. The batch's arrays are still valid only if it has features: overlap.py then
        builds no other pass before this one is read."""
        verdicts, features = self._verification.verdicts(parts, trees, output), None
        if output.features is not None:
            features = _features(parts, batch, output)
        unfinished = [index for index, part in enumerate(parts) if not part.request.finished]
        shapes = shapes_of(trees)
        if len(unfinished) < len(parts):  # some were aborted during the pass
            parts, verdicts = (
                [parts[index] for index in unfinished],
                [verdicts[index] for index in unfinished],
            )
            shapes = [shapes[index] for index in unfinished] if shapes else []
            features = None if features is None else features.of_requests(unfinished)
        return StepResult(parts, verdicts, shapes, features, batch.num_rows, attended)


def _features(parts: Sequence[Scheduled], batch: ForwardBatch, output: ForwardOutput) -> Features:
    assert output.features is not None
    num_tokens = [part.num_tokens for part in parts]
    return Features(
        output.features, batch.feature_layers, batch.row_offsets, batch.context_lengths, num_tokens
    )
