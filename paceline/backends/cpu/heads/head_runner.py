"""CpuHeadRunner: learned draft heads as compiled passes of a layer and an LM head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.attention.paged_attention import PAGE
from paceline.backends.cpu.backend import CpuBackend
from paceline.backends.cpu.compiled_model import CompiledModel, CpuPool
from paceline.backends.cpu.heads.draft_chains import (
    NEXT_ARRAYS,
    NEXT_CONTEXTS,
    NEXT_LOGIT_ROWS,
    NEXT_PARENTS,
    run_coupled,
)
from paceline.backends.cpu.heads.head_workspace import HeadWorkspace
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.weights.packing import address_of
from paceline.backends.head_chains import EXTEND_FACTOR
from paceline.backends.heads import (
    ChainNoise,
    HeadBatch,
    HeadChains,
    HeadOutput,
    HeadRunner,
    HeadStorage,
    first_slots,
)
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import KVPool
from paceline.errors import BackendError, ConfigError
from paceline.models.heads.checkpoint import HeadCheckpoint


class CpuHead(CompiledModel, HeadStorage):
    """A head that shares the threads, and some weights, of a CpuBackend; its pools keep features."""

    least_chance = 0.35  # best tokens per second on chat, math and code: docs/lab/2026-11-15-draft-heads.md
    keeps_features = True

    def __init__(
        self, head: HeadCheckpoint, beside: CpuBackend, max_rows: int, quantization: str = "auto"
    ) -> None:
        """`beside` is the target. If it is quantized, the head's own weights are int4 (auto) or int8."""
        if head.config.head_dim % 2:
            raise BackendError(
                f"The cpu backend needs an even head size, not {head.config.head_dim}; "
                "use the torch backend: backend='torch'."
            )
        # The head shares matrices with its target, so its activations have the same format.
        if beside.quantization == "none" and quantization in ("int8", "int4"):
            raise ConfigError(
                f"the draft head cannot be {quantization} beside a target that is not quantized; "
                "leave out its quantization."
            )
        kept = "none" if beside.quantization == "none" else "int8" if quantization == "int8" else "int4"
        workspace = HeadWorkspace(head, beside.workspace, kept, max_rows)
        super().__init__(workspace, beside)
        # [rows, parts, padded width] the target's features
        self._num_features, self._feature_width = head.config.num_features, head.config.target_hidden_size
        features = (max_rows, self._num_features, workspace.feature_padded)
        self._features = np.zeros(features, dtype=np.float32)
        self._features_at = address_of(self._features)
        self._states = np.empty((max_rows, workspace.hidden), dtype=np.float32)  # [outputs] returned
        self._job[fields.STATES_AT] = address_of(self._states)

    def bytes_per_page(self) -> int:
        """Bytes of keys, values and features of 16 tokens."""
        return super().bytes_per_page() + 2 * PAGE * self._num_features * self._feature_width

    def make_pool(self, num_pages: int) -> CpuPool:
        pool = super().make_pool(num_pages)
        shape = (num_pages * PAGE, self._num_features, self._feature_width)
        return replace(pool, features=np.zeros(shape, dtype=np.uint16))

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        assert isinstance(pool, CpuPool)
        pool.features[destination] = pool.features[source]

    def _fill(self, inputs: Float32Array, batch: HeadBatch) -> None:
        """Write the states of a pass's rows to `inputs` [rows, parts, padded width]."""
        if batch.slot_mapping is not None:
            assert isinstance(batch.rows.pool, CpuPool)
            _read_features(batch.rows.pool.features, batch.slot_mapping, batch.states, inputs)
            return
        rows = batch.rows.num_rows
        apart = batch.states.reshape(rows, inputs.shape[1], -1)
        inputs[:rows, :, : apart.shape[2]] = apart


class CpuHeadRunner(CpuHead, HeadRunner):
    """A HeadRunner whose passes draft one token per chain or path."""

    def __init__(
        self, head: HeadCheckpoint, beside: CpuBackend, max_rows: int, quantization: str = "auto"
    ) -> None:
        super().__init__(head, beside, max_rows, quantization)
        # [rows, 1, hidden] states that the head returned, for rows after drafted tokens
        self._fed_back = np.zeros((max_rows, 1, self.workspace.hidden), dtype=np.float32)
        self._fed_back_at = address_of(self._fed_back)
        self._least_chances = np.zeros(2, dtype=np.float32)  # to keep a token, to extend a chain
        self._seeds, self._temperatures = np.zeros(max_rows, np.uint64), np.zeros(max_rows, np.float64)
        self._wanted, self._lengths = np.zeros(max_rows, np.int32), np.zeros(max_rows, np.int32)
        self._chosen, self._chosen_chances = np.empty(max_rows, np.int32), np.empty(max_rows, np.float32)
        self._next_rows = np.empty((NEXT_ARRAYS, max_rows), np.int32)  # one row per request in every pass
        self._drafts, self._chances = np.empty(max_rows, np.int32), np.empty(max_rows, np.float32)
        ids = np.arange(0) if head.draft_ids is None else head.draft_ids
        self._target_ids = np.ascontiguousarray(ids, dtype=np.int32)  # empty: the head has all tokens
        self._candidate_ids = self._target_ids.astype(np.int64)
        self._prepare_chains()

    def prepare(self, pool: KVPool) -> None:
        """Touch the memory of the pool and, by a pass of `max_rows` rows, of the buffers."""
        assert isinstance(pool, CpuPool)
        pool.take_memory()
        rows = min(self.max_rows, pool.num_pages * PAGE - 1, self.config.max_position - 2)
        if rows > 0:
            self.run(first_slots(pool, PAGE, rows))

    def run(self, batch: HeadBatch) -> HeadOutput:
        """Logits of the wanted rows, and the states that their children read.

        A pass in which no row is wanted computes keys and values only.
        """
        self._job[fields.DRAFTING] = 0
        logits = self._run_head(batch)
        return HeadOutput(logits, self._states[: len(logits), : self.config.hidden_size])

    def run_chains(
        self, batch: HeadBatch, most: Sequence[int], least_chance: float, noise: ChainNoise | None = None
    ) -> HeadChains:
        """The best chain for each request, all passes in one compiled call: see draft_chains.py."""
        rows, job = batch.rows, self._job
        count, longest = rows.num_requests, max(most)
        if count * longest > len(self._drafts):
            self._make_room(count * longest)
        contexts = self._next_rows[
            NEXT_CONTEXTS, :count
        ]  # the first drafted token follows the rows of the pass
        np.add(rows.context_lengths, rows.row_offsets[1:], out=contexts)
        contexts -= rows.row_offsets[:-1]
        self._seeds[:count] = 0 if noise is None else noise.seeds
        self._temperatures[:count] = 0.0 if noise is None else noise.temperatures
        self._wanted[:count] = most
        self._lengths[:count] = 0
        self._least_chances[0], self._least_chances[1] = least_chance, EXTEND_FACTOR * least_chance
        job[fields.DRAFTING], job[fields.MAX_DRAFTS] = 1, longest
        self._run_head(batch)
        shape, used = (count, longest), count * longest
        drafts, chances = self._drafts[:used].reshape(shape), self._chances[:used].reshape(shape)
        return HeadChains(drafts, chances, self._lengths[:count])

    def _make_room(self, drafts: int) -> None:
        """Allocate buffers for this many drafted tokens, summed over requests."""
        self._drafts, self._chances = np.empty(drafts, np.int32), np.empty(drafts, np.float32)
        self._tell_room()

    def _tell_room(self) -> None:
        self._job[fields.DRAFTS_AT] = address_of(self._drafts)
        self._job[fields.CHANCES_AT] = address_of(self._chances)

    def _run_head(self, batch: HeadBatch) -> Float32Array:
        """Run a pass over given states: the logits of the wanted rows, valid until the next one."""
        self._fill(self._features if batch.from_target else self._fed_back, batch)
        self._job[fields.INPUTS_AT] = self._features_at if batch.from_target else self._fed_back_at
        self._job[fields.FROM_TARGET] = batch.from_target
        return self._run(batch.rows, batch.rows.logit_rows)

    def _prepare_chains(self) -> None:
        """Set the constant fields of the job for drafting chains."""
        job = self._job
        job[fields.SEEDS_AT] = address_of(self._seeds)
        job[fields.TEMPERATURES_AT] = address_of(self._temperatures)
        self._next_rows[NEXT_PARENTS] = -1
        self._next_rows[NEXT_LOGIT_ROWS] = np.arange(self.max_rows)
        job[fields.RUN_COUPLED] = run_coupled.address
        job[fields.NUM_COUNTERS] = self.workspace.counters.size
        job[fields.DRAFT_VOCABULARY] = self.config.vocab_size
        if len(self._target_ids):
            job[fields.TARGET_IDS_AT] = address_of(self._target_ids)
            job[fields.CANDIDATE_IDS_AT] = address_of(self._candidate_ids)
            job[fields.NUM_CANDIDATE_IDS] = len(self._candidate_ids)
        self._tell_room()
        job[fields.LEAST_CHANCES_AT] = address_of(self._least_chances)
        job[fields.DRAFTS_WANTED_AT] = address_of(self._wanted)
        job[fields.NUM_DRAFTS_AT] = address_of(self._lengths)
        job[fields.CHOSEN_AT] = address_of(self._chosen)
        job[fields.CHOSEN_CHANCES_AT] = address_of(self._chosen_chances)
        job[fields.NEXT_ROWS_AT] = address_of(self._next_rows)
        job[fields.NEXT_ROWS_STRIDE] = self._next_rows.strides[0]


@compiled(cached=True)
def _read_features(features, slot_mapping, mask, inputs):  # type: ignore[no-untyped-def]
    """Copy the features stored at these KV slots to the rows of a pass; for a slot of -1, the mask's."""
    bits, width = inputs.view(np.uint32), features.shape[2]
    for row, slot in enumerate(slot_mapping):
        for part in range(features.shape[1]):
            for column in range(width):
                if slot < 0:
                    inputs[row, part, column] = mask[0, part * width + column]
                else:
                    bits[row, part, column] = np.uint32(features[slot, part, column]) << np.uint32(16)
