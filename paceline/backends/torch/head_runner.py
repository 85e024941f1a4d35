"""TorchHeadRunner: learned draft heads in torch, the readable reference of all head runners."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from paceline.backends.head_chains import chains_by_passes
from paceline.backends.heads import ChainNoise, HeadBatch, HeadChains, HeadOutput, HeadRunner
from paceline.backends.torch.backend import TorchBackend, ancestors, request_rows
from paceline.backends.torch.pool import PAGE_SIZE, TorchPool, make_cache
from paceline.core.arrays import Int32Array
from paceline.core.forward import ForwardBatch
from paceline.models.config import Reach
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.torch_head import Head, make_head
from paceline.models.heads.torch_mtp import LayerHead
from paceline.models.transformer.attention import attend
from paceline.models.transformer.rows import Rows, RowView


class RankedTarget:
    """The target's embedding and LM head for a draft head on rank 0; all ranks compute them together."""

    def __init__(self, target: TorchBackend) -> None:
        self._target = target
        self.norm, self.norm_eps = target.model.norm.weight, target.model.norm.eps

    def embed(self, tokens: Tensor) -> Tensor:
        return self._target.embed(tokens)

    def scores(self, normed: Tensor) -> Tensor:
        return self._target.scores(normed)


class TorchHeadRunner(HeadRunner):
    """Implements HeadRunner with the network of torch_head.py."""

    page_size = PAGE_SIZE
    least_chance = 0.0  # on a GPU rows cost next to nothing

    def __init__(self, head: Head, max_rows: int, target_ids: Int32Array | None = None) -> None:
        """`target_ids` [draft vocabulary] are the head's ids in the target's vocabulary; None: the same."""
        self.head = head
        self.max_rows = max_rows
        self._target_ids = target_ids
        weight = head.midlayer.self_attn.q_proj.weight
        self.dtype, self.device = weight.dtype, weight.device

    @classmethod
    def load(cls, checkpoint: HeadCheckpoint, beside: TorchBackend, max_rows: int) -> TorchHeadRunner:
        """A runner with the checkpoint's weights, in the dtype and on the device of the target."""
        head = make_head(checkpoint.config, RankedTarget(beside)).requires_grad_(False)
        tensors = {name: torch.from_numpy(tensor.float32()) for name, tensor in checkpoint.tensors.items()}
        head.load_state_dict(tensors)
        return cls(head.to(device=beside.device, dtype=beside.dtype), max_rows, checkpoint.draft_ids)

    def make_pool(self, num_pages: int) -> TorchPool:
        config = self.head.config
        shapes = [(num_pages * PAGE_SIZE, config.num_kv_heads, config.head_dim)] * config.num_layers
        return TorchPool(num_pages, self.bytes_per_page(), make_cache(shapes, self.dtype, self.device))

    def bytes_per_page(self) -> int:
        config = self.head.config
        per_layer = 2 * PAGE_SIZE * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        return config.num_layers * per_layer

    @torch.inference_mode()
    def run(self, batch: HeadBatch) -> HeadOutput:
        """Logits of the wanted rows, and the states that their children read."""
        rows = batch.rows
        assert rows.num_rows <= self.max_rows, f"{rows.num_rows} rows, but max_rows is {self.max_rows}"
        states = torch.from_numpy(batch.states).to(device=self.device, dtype=self.dtype)
        if batch.from_target:
            states = self.head.fuse(states)
        wanted = self._outputs(states, rows)[self._tensor(rows.logit_rows)]
        logits, states = self.head.logits(wanted), self.head.feed_back(wanted)
        return HeadOutput(logits.float().cpu().numpy(), states.float().cpu().numpy())

    def _outputs(self, states: Tensor, batch: ForwardBatch) -> Tensor:
        """The head's outputs [rows, hidden]; its keys and values are stored."""
        views, slot_mapping = self._views(batch)
        cache = cast(TorchPool, batch.pool).cache

        def attend_in_layer(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            pages = cache.keys[layer], cache.values[layer]
            return _attend(query, key, value, pages, views, slot_mapping)

        attends = [partial(attend_in_layer, layer) for layer in range(self.head.config.num_layers)]
        tokens, positions = self._tensor(batch.tokens), self._tensor(batch.positions)
        outputs: Tensor = self.head(states, tokens, positions, *attends)
        return outputs

    def run_chains(
        self, batch: HeadBatch, most: Sequence[int], least_chance: float, noise: ChainNoise | None = None
    ) -> HeadChains:
        """Chains drafted after each request."""
        return chains_by_passes(self.run, batch, self._target_ids, most, least_chance, noise)

    def _views(self, batch: ForwardBatch) -> tuple[list[RowView], Tensor]:
        """The keys visible to the rows of each request, and the KV slot of every row."""
        views, new_slots = [], []
        for rows, context, key_slots in request_rows(batch):
            new_slots.append(key_slots[context:])
            related = ancestors(batch.parents[rows])
            sees_context = np.ones((len(related), context - 1), dtype=np.bool_)
            mask = torch.from_numpy(np.concatenate((sees_context, related), axis=1)).to(self.device)
            seen_slots = self._tensor(key_slots[1:])  # a head has no row at KV index 0
            views.append(RowView(rows, seen_slots, {Reach(): mask}))
        return views, self._tensor(np.concatenate(new_slots))

    def _tensor(self, array: Int32Array) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)


class TorchLayerHeadRunner(TorchHeadRunner):
    """Implements HeadRunner with the network of torch_mtp.py."""

    head: LayerHead  # type: ignore[assignment]  # it takes rows and pages where others take `attend`

    def __init__(self, head: LayerHead, max_rows: int) -> None:
        self.head, self.max_rows, self._target_ids = head, max_rows, None
        self.dtype, self.device = head.dtype, head.device

    @classmethod
    def load(cls, checkpoint: HeadCheckpoint, beside: TorchBackend, max_rows: int) -> TorchLayerHeadRunner:
        """A runner with the checkpoint's weights, in the dtype and on the device of the target."""

        def take(name: str) -> Tensor:
            values = torch.from_numpy(checkpoint.tensors[name].float32())
            return values.to(device=beside.device, dtype=beside.dtype, copy=True)

        return cls(LayerHead(checkpoint.config, take, RankedTarget(beside)), max_rows)

    def make_pool(self, num_pages: int) -> TorchPool:
        layer = self.head.layer_config
        shape = (1, num_pages * PAGE_SIZE, layer.num_kv_heads, layer.head_dim)
        cache = make_cache([shape], self.dtype, self.device, [layer.stored_value_dim(0)])
        return TorchPool(num_pages, self.bytes_per_page(), cache)

    def bytes_per_page(self) -> int:
        return PAGE_SIZE * self.head.layer_config.kv_values(0) * self.dtype.itemsize

    def _outputs(self, states: Tensor, batch: ForwardBatch) -> Tensor:
        views, slot_mapping = self._views(batch)
        rows = Rows(self._tensor(batch.tokens), self._tensor(batch.positions), slot_mapping, views)
        return self.head.outputs(states, rows, cast(TorchPool, batch.pool).cache)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: tuple[Tensor, Tensor],
    views: list[RowView],
    slot_mapping: Tensor,
) -> Tensor:
    """Attention of all rows, after their keys and values are written to their KV slots."""
    keys, values = pages
    keys[slot_mapping], values[slot_mapping] = key, value
    mixed = torch.empty_like(query)
    for view in views:
        mixed[view.rows] = attend(
            query[view.rows], keys[view.key_slots], values[view.key_slots], view.masks[Reach()]
        )
    return mixed
