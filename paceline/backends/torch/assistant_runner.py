"""TorchAssistantRunner: Gemma 4's assistants in torch, over the KV pool of their target."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from paceline.backends.heads import AssistantRunner, HeadOutput
from paceline.backends.torch.backend import TorchBackend, kv_slots, within
from paceline.backends.torch.pool import TorchPool
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import ForwardBatch
from paceline.errors import ConfigError
from paceline.models.heads.assistant import AssistantCheckpoint
from paceline.models.heads.torch_assistant import Assistant
from paceline.models.transformer.rows import Rows, RowView


class TorchAssistantRunner(AssistantRunner):
    """Implements AssistantRunner with the network of torch_assistant.py."""

    def __init__(self, assistant: Assistant, target: TorchBackend) -> None:
        self.assistant, self.target = assistant, target

    @classmethod
    def load(cls, checkpoint: AssistantCheckpoint, beside: TorchBackend) -> TorchAssistantRunner:
        """A runner with the checkpoint's weights, in the dtype and on the device of the target."""
        if beside.ranks is not None:
            raise ConfigError(
                "an assistant reads its target's keys and values, which lie on several devices here. Use "
                "--tensor-parallel-size 1, or another method."
            )

        def take(name: str, rows: slice | None = None) -> Tensor:
            tensor = checkpoint.tensors[name]
            values = torch.from_numpy((tensor if rows is None else tensor.take_rows(rows)).float32())
            return values.to(device=beside.device, dtype=beside.dtype, copy=True)

        return cls(Assistant(checkpoint, beside.model, take), beside)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, states: Float32Array) -> HeadOutput:
        """Logits of all rows, and the states that the rows after them read."""
        own = self.assistant
        embedded = self.target.model.embed(self._tensor(batch.tokens))
        given = torch.from_numpy(states).to(device=own.device, dtype=own.dtype)
        cache = cast(TorchPool, batch.pool).cache
        outputs = own.outputs(embedded, given, self._rows(batch), cache)
        logits, following = own.scores(outputs), own.feed_back(outputs)
        return HeadOutput(logits.float().cpu().numpy(), following.float().cpu().numpy())

    def _rows(self, batch: ForwardBatch) -> Rows:
        """The rows as the model reads them: each attends only to the committed tokens of its request."""
        config, views, pool = self.assistant.config, [], cast(TorchPool, batch.pool)
        for request in range(batch.num_requests):
            rows = slice(int(batch.row_offsets[request]), int(batch.row_offsets[request + 1]))
            context = int(batch.context_lengths[request])
            keys = np.arange(context, dtype=np.int32)
            reaches = {config.reach(layer) for layer in range(config.num_layers)}
            masks = {
                reach: torch.from_numpy(within(reach, batch.positions[rows], keys)).to(self.target.device)
                for reach in reaches
            }
            slots = kv_slots(batch.page_tables[request], context)
            windows = pool.window_slots(slots)
            seen = None if windows is None else self._tensor(windows)
            views.append(RowView(rows, self._tensor(slots), masks, seen))
        tokens, positions = self._tensor(batch.tokens), self._tensor(batch.positions)
        return Rows(tokens, positions, slot_mapping=tokens[:0], views=views)

    def _tensor(self, array: Int32Array) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.target.device)
