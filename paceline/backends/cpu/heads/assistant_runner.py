"""CpuAssistantRunner: Gemma 4's assistants as compiled passes over the KV pool of their target."""

from __future__ import annotations

import numpy as np

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.backend import CpuBackend
from paceline.backends.cpu.compiled_model import CompiledModel
from paceline.backends.cpu.heads.head_workspace import AssistantWorkspace
from paceline.backends.cpu.weights.packing import address_of
from paceline.backends.heads import AssistantRunner, HeadOutput
from paceline.core.arrays import Float32Array
from paceline.core.forward import ForwardBatch
from paceline.models.heads.assistant import CENTROIDS, POST, AssistantCheckpoint


class CpuAssistantRunner(CompiledModel, AssistantRunner):
    """Implements AssistantRunner with the threads, the embedding and the KV pool of a CpuBackend."""

    def __init__(self, checkpoint: AssistantCheckpoint, beside: CpuBackend) -> None:
        """`beside` is the target. If it is quantized, the assistant's weights are int8."""
        kept = "none" if beside.quantization == "none" else "int8"
        workspace = AssistantWorkspace(checkpoint, beside.workspace, kept, beside.max_rows)
        super().__init__(workspace, beside)
        self._clusters = checkpoint.clusters
        self._to_target = np.ascontiguousarray(checkpoint.tensors[POST].float32().T)  # [hidden, the target's]
        if self._clusters is not None:
            self._centroids = np.ascontiguousarray(checkpoint.tensors[CENTROIDS].float32().T)
        self._given = np.zeros((self.max_rows, workspace.feature_padded), dtype=np.float32)
        self._outputs = np.empty((self.max_rows, workspace.hidden), dtype=np.float32)
        self._job[fields.INPUTS_AT], self._job[fields.STATES_AT] = (
            address_of(self._given),
            address_of(self._outputs),
        )

    def run(self, batch: ForwardBatch, states: Float32Array) -> HeadOutput:
        """Logits of all rows, and the states that the rows after them read."""
        rows = batch.num_rows
        assert len(batch.logit_rows) == rows, "every row is wanted"
        self._given[:rows, : states.shape[1]] = states
        logits = self._run(batch, batch.logit_rows)
        outputs = self._outputs[:rows, : self.config.hidden_size]
        return HeadOutput(self._scored(logits, outputs), outputs @ self._to_target)

    def _scored(self, logits: Float32Array, outputs: Float32Array) -> Float32Array:
        """The logits; -inf for tokens outside of the chosen clusters."""
        if self._clusters is None:
            return logits
        chosen = self._clusters.chosen
        best = np.argpartition(-(outputs @ self._centroids), chosen - 1, axis=1)[:, :chosen]
        tokens = self._clusters.tokens[best].reshape(len(logits), -1)
        scored = np.full_like(logits, -np.inf)
        np.put_along_axis(scored, tokens, np.take_along_axis(logits, tokens, axis=1), axis=1)
        return scored
