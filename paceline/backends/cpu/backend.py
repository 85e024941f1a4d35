"""CpuBackend: compiled passes with int8 activations and 4-bit or 8-bit weights, one call per pass.

It is batch-invariant: a token's logits have the same bits when it is decoded alone, in a prefill chunk of any
size, as a drafted node, or beside other requests. weight_tile.py, rows.py and paged_attention.py explain why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.backends.base import Backend
from paceline.backends.cpu import job as fields
from paceline.backends.cpu.compiled_model import CompiledModel, CpuPool
from paceline.backends.cpu.features import KEPT_FIELDS
from paceline.backends.cpu.states import SPARE_STATES, CpuStates, RecurrentRows
from paceline.backends.cpu.weights.adapters import AdapterTables
from paceline.backends.cpu.weights.packing import address_of
from paceline.backends.cpu.workspace import Workspace
from paceline.core.arrays import Float32Array
from paceline.core.forward import ForwardBatch, ForwardOutput, KeptFeatures, KVPool, StatePool
from paceline.errors import BackendError, ConfigError
from paceline.machine import usable_cores
from paceline.models.checkpoint import Checkpoint
from paceline.models.lora import Adapter
from paceline.models.quantizations import DEFAULTS, QUANTIZATIONS
from paceline.options import check_choice


class CpuBackend(CompiledModel, Backend):
    """A model run by compiled code on `threads` cores."""

    name = "cpu"
    batch_invariant = True
    supports_features = True
    chooses = True

    def __init__(
        self,
        workspace: Workspace,
        quantization: str,
        beside: CpuBackend | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        super().__init__(workspace, beside)
        self._adapters = AdapterTables(adapters, workspace) if adapters else None
        self.adapters = self._adapters.tables if self._adapters else {}
        self.quantization = quantization
        self.weight_format = "float32" if quantization == "none" else quantization
        self.attention_window = self.config.widest_window
        self.window_group = self.config.window_group
        self._feature_layers: tuple[int, ...] = ()  # of the last pass
        self._features = np.empty((0, 0), dtype=np.float32)
        self._kept: tuple[KeptFeatures, ...] = ()  # of the last pass
        self._kept_parts = np.empty((0, KEPT_FIELDS), dtype=np.int64)  # see KEPT_AT in features.py
        self._tell_kept(())
        self._recurrent = RecurrentRows(workspace) if self.config.recurrent else None
        self.bytes_per_state = self._recurrent.bytes_per_state if self._recurrent else 0
        self.spare_states, self.buffer_bytes = SPARE_STATES, workspace.buffer_bytes
        self._chosen = np.empty(workspace.rows, dtype=np.int32)
        self._job[fields.CHOSEN_TOKENS_AT] = address_of(self._chosen)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        quantization: str = "auto",
        threads: int | None = None,
        max_rows: int = 512,
        beside: CpuBackend | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> CpuBackend:
        """A backend with the checkpoint's weights.

        `beside`: a backend whose threads it shares. Passes of the two must not overlap.

        `quantization`: "native" keeps a GGUF file's blocks and quantizes the rest to int8, "int8" and "int4"
        quantize everything, "none" is float32; "auto" is "native".
        """
        supported = ("auto", *QUANTIZATIONS["cpu"])
        check_choice(ConfigError, "quantization of the cpu backend", quantization, supported)
        if threads is not None and threads < 1:
            raise ConfigError(
                f"threads is {threads}, but a pass needs at least 1; leave it out for every core."
            )
        if max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows}, but a pass needs at least 1 row; give 1 or more.")
        if checkpoint.config.head_dim % 2:
            raise BackendError(
                f"The cpu backend needs an even head size, not {checkpoint.config.head_dim}; "
                "use the torch backend: backend='torch'."
            )
        if quantization == "auto":
            quantization = DEFAULTS["cpu"]
        workspace = Workspace(checkpoint, quantization, threads or usable_cores(), max_rows)
        return cls(workspace, quantization, beside, adapters)

    def first_layers(self, count: int) -> CpuBackend:
        """The same model without its later layers, over the same pools, with the same threads."""
        return CpuBackend(self.workspace.first_layers(count), self.quantization, beside=self)

    def prepare(
        self,
        pool: KVPool,
        longest: int,
        feature_layers: tuple[int, ...],
        kept: tuple[KeptFeatures, ...] = (),
    ) -> None:
        """Touch the pool's memory, so that no pass waits for page faults."""
        assert isinstance(pool, CpuPool)
        pool.take_memory()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Logits of the wanted rows; on request also features of all rows, and tokens sampled here."""
        features, choices, job = self._prepare_features(batch), batch.choices, self._job
        if self._recurrent is not None:
            self._recurrent.begin_pass(batch)
        if self._adapters is not None:
            self._adapters.begin_pass(batch)
        if choices is None:
            job[fields.NUM_CHOSEN] = 0
            return ForwardOutput(self._run(batch, batch.logit_rows), features)
        wanted, count = len(batch.logit_rows), len(choices.rows)
        job[fields.NUM_CHOSEN] = count
        job[fields.SEEDS_AT] = address_of(choices.seeds)
        job[fields.TEMPERATURES_AT] = address_of(choices.temperatures)
        logits = self._run(
            batch, np.concatenate((batch.logit_rows, choices.rows)) if wanted else choices.rows
        )
        return ForwardOutput(logits[:wanted], features, self._chosen[:count])

    def make_states(self, count: int) -> CpuStates:
        """Zeroed storage for `count` states of the recurrent layers."""
        assert self._recurrent is not None
        return self._recurrent.make_states(count)

    def copy_state(self, states: StatePool, source: int, destination: int) -> None:
        """Copy the state of one slot to another."""
        assert isinstance(states, CpuStates)
        states.copy(source, destination)

    def advance_state(
        self, states: StatePool, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]
    ) -> None:
        """Use the state that the last pass stored, or scan the accepted rows again."""
        assert isinstance(states, CpuStates)
        assert self._recurrent is not None
        if not self._recurrent.take_stored(states, slot, rows, checkpoints):
            self._recurrent.begin_advance(states, slot, rows, checkpoints)
            self._run_advance()
        if len(rows) in checkpoints:
            states.copy(slot, checkpoints[len(rows)])

    def _prepare_features(self, batch: ForwardBatch) -> Float32Array | None:
        """The buffer for the wanted features of all rows, also set in the job; the same in every pass."""
        slots, layers, job = self.workspace.feature_slots, batch.feature_layers, self._job
        if batch.kept_features is not self._kept:
            self._tell_kept(batch.kept_features)
        if layers != self._feature_layers:
            slots.fill(-1)
            slots[list(layers)] = np.arange(len(layers))
            self._feature_layers = layers
        if not layers:
            return None
        width = self.config.hidden_size * len(layers)
        if self._features.shape[1] != width or len(self._features) < batch.num_rows:
            self._features = np.empty((batch.num_rows, width), dtype=np.float32)
            job[fields.FEATURES_AT] = address_of(self._features)
            job[fields.FEATURES_STRIDE] = self._features.strides[0]
        return self._features[: batch.num_rows]

    def _tell_kept(self, kept: tuple[KeptFeatures, ...]) -> None:
        """Set in the job which features passes write to heads' pools."""
        parts: list[tuple[int, int, int]] = []
        for one in kept:
            assert isinstance(one.pool, CpuPool)
            features = one.pool.features
            addresses = [address_of(features[:, part]) for part in range(len(one.layers))]
            parts += zip(one.layers, addresses, [features.strides[0]] * len(addresses), strict=True)
        self._kept, self._kept_parts = kept, np.array(parts, dtype=np.int64).reshape(-1, KEPT_FIELDS)
        self._job[fields.KEPT], self._job[fields.KEPT_AT] = len(parts), address_of(self._kept_parts)
