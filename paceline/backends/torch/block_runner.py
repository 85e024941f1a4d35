"""TorchBlockRunner: parallel draft heads in torch, the readable reference of all block runners."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor

from paceline.backends.block_chains import chains_by_guesses
from paceline.backends.heads import BlockGuesses, BlockRunner, ChainNoise, HeadBatch, HeadChains
from paceline.backends.torch.backend import TorchBackend, kv_slots
from paceline.backends.torch.head_runner import RankedTarget
from paceline.backends.torch.pool import PAGE_SIZE, TorchPool, make_cache
from paceline.core.arrays import Int32Array
from paceline.core.forward import ForwardBatch
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.torch_block import BlockHead, block_mask
from paceline.models.transformer.attention import attend


class TorchBlockRunner(BlockRunner):
    """Implements BlockRunner with the network of torch_block.py."""

    page_size = PAGE_SIZE
    least_chance = 0.0  # on a GPU rows cost next to nothing

    def __init__(self, head: BlockHead, max_rows: int, draft_ids: Int32Array | None = None) -> None:
        self.head, self._draft_ids = head, draft_ids
        self.max_rows = max_rows
        weight = head.fc.weight
        self.dtype, self.device = weight.dtype, weight.device
        self._outputs = torch.empty(0)  # [rows, hidden] of the last blocks

    @classmethod
    def load(cls, checkpoint: HeadCheckpoint, beside: TorchBackend, max_rows: int) -> TorchBlockRunner:
        """A runner with the checkpoint's weights, in the dtype and on the device of the target."""
        head = BlockHead(checkpoint.config, RankedTarget(beside)).requires_grad_(False)
        tensors = {name: torch.from_numpy(tensor.float32()) for name, tensor in checkpoint.tensors.items()}
        head.load_state_dict(tensors)
        return cls(head.to(device=beside.device, dtype=beside.dtype), max_rows, checkpoint.draft_ids)

    def make_pool(self, num_pages: int) -> TorchPool:
        config = self.head.config
        shapes = [(num_pages * PAGE_SIZE, config.num_kv_heads, config.head_dim)] * len(self.head.layers)
        return TorchPool(num_pages, self.bytes_per_page(), make_cache(shapes, self.dtype, self.device))

    def bytes_per_page(self) -> int:
        config = self.head.config
        per_token = 2 * len(self.head.layers) * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        return per_token * PAGE_SIZE

    @torch.inference_mode()
    def write_context(self, batch: HeadBatch) -> None:
        """Write the keys and values of committed tokens: every layer projects the same fused state."""
        rows = batch.rows
        assert rows.num_rows <= self.max_rows, f"{rows.num_rows} rows, but max_rows is {self.max_rows}"
        cache = cast(TorchPool, rows.pool).cache
        starts = zip(rows.context_lengths.tolist(), np.diff(rows.row_offsets).tolist(), strict=True)
        slots = [
            kv_slots(table, start + count)[start:]
            for table, (start, count) in zip(rows.page_tables, starts, strict=True)
        ]
        slot_mapping, positions = self._tensor(np.concatenate(slots)), self._tensor(rows.positions)
        features = torch.from_numpy(batch.states).to(device=self.device, dtype=self.dtype)
        context = self.head.context(features)
        for layer in range(len(self.head.layers)):
            key, value = self.head.keys_values(layer, context, positions)
            cache.keys[layer][slot_mapping], cache.values[layer][slot_mapping] = key, value

    @torch.inference_mode()
    def run_blocks(self, blocks: ForwardBatch) -> None:
        """Run the blocks of requests; their keys and values are not stored."""
        assert blocks.num_rows <= self.max_rows, f"{blocks.num_rows} rows, but max_rows is {self.max_rows}"
        cache = cast(TorchPool, blocks.pool).cache
        positions = self._tensor(blocks.positions)
        ends = blocks.row_offsets.tolist()
        lengths = zip(blocks.page_tables, blocks.context_lengths.tolist(), strict=True)
        slots_of = [self._tensor(kv_slots(table, length)) for table, length in lengths]
        contexts = [(slice(*rows), slots) for rows, slots in zip(pairwise(ends), slots_of, strict=True)]

        def attend_in_layer(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mixed = torch.empty_like(query)
            for rows, slots in contexts:
                before, inside = torch.arange(len(slots), device=self.device), positions[rows]
                in_block = torch.cat((torch.zeros_like(before), torch.ones_like(inside))).bool()
                distance = inside[:, None] - torch.cat((before, inside))
                mixed[rows] = attend(
                    query[rows],
                    torch.cat((cache.keys[layer][slots], key[rows])),
                    torch.cat((cache.values[layer][slots], value[rows])),
                    block_mask(self.head, layer, distance, in_block.expand(distance.shape)),
                )
            return mixed

        self._outputs = self.head(self._tensor(blocks.tokens), positions, attend_in_layer)

    @torch.inference_mode()
    def guess(self, slots: Int32Array, previous: Int32Array) -> BlockGuesses:
        """Logits of rows of the last blocks, and their confidences."""
        outputs, before = self._outputs[self._tensor(slots)], self._tensor(previous)
        logits = self.head.guesses(outputs, before).float().cpu().numpy()
        confidence = self.head.confidence(outputs, before)
        return BlockGuesses(
            logits, None if confidence is None else confidence.float().sigmoid().cpu().numpy()
        )

    def run_chains(
        self, blocks: ForwardBatch, most: Sequence[int], least_chance: float, noise: ChainNoise
    ) -> HeadChains:
        """The best chain from each block."""
        self.run_blocks(blocks)
        return chains_by_guesses(
            self.guess, blocks, self.head.block, self._draft_ids, most, least_chance, noise
        )

    def _tensor(self, array: Int32Array) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)
