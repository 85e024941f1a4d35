"""CudaAssistantRunner: Gemma 4's assistants, over the KV pool of their target (models/heads/assistant.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from paceline.backends.cuda.backend import CudaBackend
from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed
from paceline.backends.cuda.kernels.residual import plain
from paceline.backends.cuda.model import run_assistant_layers
from paceline.backends.cuda.native.many_rows import project
from paceline.backends.cuda.passes.graphs import Graphs, bucket
from paceline.backends.cuda.passes.host_passes import MAX_PAGES
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.tables import DeviceTables, rows_of, to_device
from paceline.backends.cuda.passes.workspace import Room, Workspace, make_workspace
from paceline.backends.cuda.weights.model_weights import Weights, load_weights
from paceline.backends.cuda.weights.shard import TILE
from paceline.backends.cuda.weights.tiled import matrix
from paceline.backends.cuda.weights.vocabulary import embed_tokens
from paceline.backends.heads import AssistantRunner, HeadOutput
from paceline.core.arrays import Float32Array
from paceline.core.forward import ForwardBatch
from paceline.errors import ConfigError
from paceline.models.heads.assistant import CENTROIDS, POST, PRE, AssistantCheckpoint, Clusters


@dataclass(frozen=True)
class AssistantWeights:
    """The weights of an assistant: a small Gemma 4 between two projections."""

    model: Weights
    pre: Matrix  # [target's embedding, state] -> residual stream
    post: Matrix  # output -> state
    centroids: torch.Tensor | None  # [clusters, padded hidden]


@dataclass(frozen=True)
class _Buffers:
    """The buffers of passes of at most `room.rows` rows; captured graphs hold their addresses."""

    room: Room
    workspace: Workspace
    tables: DeviceTables
    embedded: torch.Tensor  # float32 [rows, the target's padded hidden]
    unused: Normed  # written by the embedding kernel, never read
    inputs: torch.Tensor  # [rows, padded 2 * the target's hidden] embeddings, then states; padding is zero
    states: torch.Tensor  # float32 [rows, the target's hidden] output states, input of the next steps


class CudaAssistantRunner(AssistantRunner):
    """Steps of an assistant, in a CUDA graph by bucket of rows."""

    def __init__(self, weights: AssistantWeights, clusters: Clusters | None, target: CudaBackend) -> None:
        self.weights, self.target, self.device = weights, target, target.device
        self._clusters = clusters
        self._cluster_tokens = None
        if clusters is not None:
            self._cluster_tokens = torch.from_numpy(clusters.tokens).to(self.device)
        self._buffers: _Buffers | None = None
        self._graphs = Graphs(self.device)

    @classmethod
    def load(cls, checkpoint: AssistantCheckpoint, beside: CudaBackend) -> CudaAssistantRunner:
        """A runner with the checkpoint's weights, in the dtype and on the device of the target."""
        if beside.ranks is not None:
            raise ConfigError(
                "an assistant reads its target's keys and values, which lie on several devices here. Use "
                "--tensor-parallel-size 1, or another method."
            )

        def take(name: str) -> torch.Tensor:
            values = torch.from_numpy(checkpoint.tensors[name].float32())
            return values.to(device=beside.device, dtype=beside.dtype)

        model = load_weights(checkpoint.beside(beside.config), take)
        centroids = take(CENTROIDS) if checkpoint.clusters is not None else None
        around = matrix(take(PRE), None), matrix(take(POST), None)
        return cls(AssistantWeights(model, *around, centroids), checkpoint.clusters, beside)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, states: Float32Array) -> HeadOutput:
        """Logits of all rows, and the states that the rows after them read."""
        count, pool, hidden = batch.num_rows, cast(Pool, batch.pool), self.target.config.hidden_size
        rows, alone = bucket(count), _each_alone(batch)
        buffers = self._hold(rows, int(batch.positions.max()) + 1)
        height = tile_height(*self.weights.model.head_groups)
        row_arrays = rows_of(alone, self.target.page_size, height, windows=pool.windows)
        buffers.tables.send(alone, row_arrays)
        buffers.inputs[:count, hidden : 2 * hidden] = to_device(states, self.device)
        self._graphs.run((rows, pool.addresses), lambda: self._step(buffers, rows, pool))
        logits = buffers.workspace.logits[:count]
        if self._cluster_tokens is not None:
            logits = self._of_best_clusters(logits, buffers.workspace.attention_input.rows[:count])
        return HeadOutput(logits.cpu().numpy(), buffers.states[:count].cpu().numpy())

    def _step(self, buffers: _Buffers, rows: int, pool: Pool) -> None:
        """All layers, with the projections before and after them."""
        weights, workspace, target = self.weights, buffers.workspace, self.target.weights
        size, scale = target.config.hidden_size, target.config.embedding_scale
        tokens, tables, scratch = buffers.tables.tokens(rows), buffers.tables.tables(rows), workspace.scratch
        embed_tokens(tokens, target.embedding, buffers.embedded, target.norm, buffers.unused)
        buffers.inputs[:rows, :size] = buffers.embedded[:rows, :size] * scale
        assert workspace.residual is not None
        read = plain(buffers.inputs, workspace.residual.ones)
        project(read, weights.pre, workspace.hidden, rows, scratch)
        run_assistant_layers(weights.model, workspace, tables, pool, self.target.page_size)
        project(workspace.attention_input, weights.model.head, workspace.logits, rows, scratch)
        project(workspace.attention_input, weights.post, buffers.states, rows, scratch)

    def _of_best_clusters(self, logits: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """The logits of tokens in the best clusters of each row; -inf of others."""
        assert self._cluster_tokens is not None
        assert self._clusters is not None
        assert self.weights.centroids is not None
        scores = outputs[:, : self.weights.centroids.shape[1]] @ self.weights.centroids.T
        tokens = self._cluster_tokens[scores.topk(self._clusters.chosen, dim=-1).indices].flatten(1)
        return torch.full_like(logits, -torch.inf).scatter(-1, tokens, logits.gather(-1, tokens))

    def _hold(self, rows: int, longest: int) -> _Buffers:
        """Buffers for this many rows and contexts of this length."""
        held = self._buffers
        if held is None or rows > held.room.rows or longest > held.room.longest:
            known = Room.of(rows, 2 * bucket(longest))
            held = self._buffers = self._make(known if held is None else known.holding(held.room))
            self._graphs = Graphs(self.device)  # captured graphs hold addresses
        return held

    def _make(self, room: Room) -> _Buffers:
        workspace, target = make_workspace(self.weights.model, room), self.target.weights
        rows, like, size = len(workspace.hidden), target.norm, target.config.hidden_size

        def zeros(width: int) -> torch.Tensor:
            return torch.zeros((rows, width), device=self.device)

        embedded = zeros(target.hidden)
        squares = zeros(target.hidden // TILE)
        return _Buffers(
            room,
            workspace,
            DeviceTables(rows, MAX_PAGES, self.device),
            embedded,
            Normed(like.new_zeros(embedded.shape), squares, size, target.config.rms_norm_eps),
            like.new_zeros((rows, self.weights.pre.depth)),
            zeros(size),
        )


def _each_alone(batch: ForwardBatch) -> ForwardBatch:
    """The rows as separate requests, each of which attends up to the last committed token."""
    request = np.repeat(np.arange(batch.num_requests), np.diff(batch.row_offsets))
    seen = (batch.context_lengths[request] - 1).astype(np.int32)
    return replace(
        batch,
        positions=seen,
        row_offsets=np.arange(batch.num_rows + 1, dtype=np.int32),
        context_lengths=seen,
        page_tables=batch.page_tables[request],
    )
