"""Multi-LoRA passes for backends that run one adapter at a time: split by adapter, run, merge the outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.arrays import Int32Array
from paceline.core.forward import Choices, ForwardBatch, ForwardOutput


@dataclass(frozen=True)
class AdapterGroup:
    """The requests of a pass that have one adapter."""

    adapter: str
    batch: ForwardBatch
    rows: Int32Array  # [rows of the group] row numbers in the whole pass
    outputs: Int32Array  # [outputs of the group] indices of its logits in the whole pass
    choices: Int32Array  # [choices of the group] indices of its sampled tokens in the whole pass


def forward_by_adapter(
    batch: ForwardBatch, forward: Callable[[str, ForwardBatch], ForwardOutput]
) -> ForwardOutput:
    """The outputs of a whole pass, of which `forward` runs one group per adapter."""
    groups = split_by_adapter(batch)
    outputs = [forward(group.adapter, group.batch) for group in groups]
    if len(groups) == 1:
        return outputs[0]
    logits = np.empty((len(batch.logit_rows), outputs[0].logits.shape[1]), dtype=np.float32)
    chosen = None if batch.choices is None else np.empty(len(batch.choices.rows), dtype=np.int32)
    features = None
    for group, output in zip(groups, outputs, strict=True):
        logits[group.outputs] = output.logits
        if chosen is not None and output.chosen is not None:
            chosen[group.choices] = output.chosen
        if output.features is not None:
            if features is None:
                features = np.empty((batch.num_rows, output.features.shape[1]), dtype=np.float32)
            features[group.rows] = output.features
    return ForwardOutput(logits, features, chosen)


def split_by_adapter(batch: ForwardBatch) -> list[AdapterGroup]:
    """One group per adapter of a pass, in order of first occurrence."""
    names = dict.fromkeys(batch.adapters)
    return [_group(batch, name) for name in names]


def _group(batch: ForwardBatch, adapter: str) -> AdapterGroup:
    requests = np.array([i for i, name in enumerate(batch.adapters) if name == adapter])
    counts = np.diff(batch.row_offsets)[requests]
    rows = np.concatenate([np.arange(*batch.row_offsets[i : i + 2], dtype=np.int32) for i in requests])
    place = np.full(batch.num_rows, -1, dtype=np.int32)  # row of the pass -> row of the group
    place[rows] = np.arange(len(rows), dtype=np.int32)
    outputs = np.flatnonzero(place[batch.logit_rows] >= 0).astype(np.int32)
    choices, places = batch.choices, np.empty(0, dtype=np.int32)
    if choices is not None:
        places = np.flatnonzero(place[choices.rows] >= 0).astype(np.int32)
        own_rows = place[choices.rows[places]]
        choices = (
            Choices(own_rows, choices.seeds[places], choices.temperatures[places]) if len(places) else None
        )
    states = batch.states and replace(batch.states, slots=batch.states.slots[requests])
    part = replace(
        batch,
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        parents=batch.parents[rows],
        row_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lengths=batch.context_lengths[requests],
        page_tables=batch.page_tables[requests],
        logit_rows=place[batch.logit_rows[outputs]],
        choices=choices,
        states=states,
        adapters=(),
    )
    return AdapterGroup(adapter, part, rows, outputs, places)
