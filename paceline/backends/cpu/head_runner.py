"""Learned draft heads as compiled passes beside the target's: one layer more, and its vocabulary."""

from __future__ import annotations

import numpy as np

from paceline.backends.base import HeadBatch, HeadOutput
from paceline.backends.cpu import job as fields
from paceline.backends.cpu.backend import CpuBackend
from paceline.backends.cpu.compiled_model import CompiledModel
from paceline.backends.cpu.head_workspace import HeadWorkspace
from paceline.backends.cpu.workspace import address_of
from paceline.draft.heads.checkpoint import HeadCheckpoint
from paceline.errors import BackendError, ConfigError


class CpuHeadRunner(CompiledModel):
    """Implements HeadRunner with the threads of a CpuBackend, and with weights that it shares."""

    def __init__(
        self, head: HeadCheckpoint, beside: CpuBackend, max_rows: int, quantization: str = "auto"
    ) -> None:
        """`beside` is the target. If it is quantized, the head's own weights are int8, or int4."""
        if head.config.head_dim % 2:
            raise BackendError(
                f"The cpu backend needs an even head size, not {head.config.head_dim}; "
                "use the torch backend: backend='torch'."
            )
        # The head reads and writes activations as its target does, whose matrices it shares.
        if beside.quantization == "none" and quantization in ("int8", "int4"):
            raise ConfigError(
                f"the draft head cannot be {quantization} beside a target that is not quantized; "
                "leave out its quantization."
            )
        kept = "none" if beside.quantization == "none" else "int4" if quantization == "int4" else "int8"
        workspace = HeadWorkspace(head, beside.workspace, kept, max_rows)
        super().__init__(workspace, beside)
        # what a pass reads, each row in its parts with padding: the target's features, and own states
        features = (max_rows, head.config.num_features, workspace.feature_padded)
        self._features = np.zeros(features, dtype=np.float32)
        self._fed_back = np.zeros((max_rows, 1, workspace.hidden), dtype=np.float32)
        self._states = np.empty((max_rows, workspace.hidden), dtype=np.float32)  # given back, by output
        self._job[fields.STATES_AT] = address_of(self._states)

    def run(self, batch: HeadBatch) -> HeadOutput:
        """Logits of the wanted rows, and the states that their children read.

        A pass in which no row is wanted computes keys and values only.
        """
        rows, outputs = batch.rows.num_rows, len(batch.rows.logit_rows)
        inputs = self._features if batch.from_target else self._fed_back
        apart = batch.states.reshape(rows, inputs.shape[1], -1)
        inputs[:rows, :, : apart.shape[2]] = apart
        self._job[fields.INPUTS_AT], self._job[fields.FROM_TARGET] = address_of(inputs), batch.from_target
        logits = self._run(batch.rows)
        return HeadOutput(logits, self._states[:outputs, : self.config.hidden_size])
