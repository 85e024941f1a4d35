"""Hidden features of a pass: returned to the caller, or written to the pools of draft heads.

KEPT_AT is a table of the feature parts that go to pools, three numbers each: the index of the layer whose
input (the residual stream) is the part, the address of the part at KV slot 0, and the bytes between two
slots. Features are stored at the KV slots of their rows, so heads read them in place; those of rejected rows
are overwritten, as their keys and values are.
"""

from __future__ import annotations

from paceline.backends.cpu.attention.paged_attention import PAGE
from paceline.backends.cpu.attention.phases import kv_index, page_of
from paceline.backends.cpu.job import (
    FEATURE_SLOT_AT,
    FEATURES_AT,
    FEATURES_STRIDE,
    HIDDEN,
    HIDDEN_PADDED,
    KEPT,
    KEPT_AT,
    REQUEST_AT,
    STATE_AT,
    field,
    take,
)
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.simd import load_float, load_int32, load_int64, store_float, store_word

KEPT_FIELDS = 3  # numbers of a part: layer, address, stride
_LAYER, _ADDRESS, _STRIDE = 0, 8, 16


@compiled
def _kept_part(job, number):  # type: ignore[no-untyped-def]
    """The address of a part's line in the table."""
    return field(job, KEPT_AT) + 8 * KEPT_FIELDS * number


@compiled
def are_wanted(job, index):  # type: ignore[no-untyped-def]
    """Whether the residual stream before layer `index` is a wanted feature."""
    wanted = load_int64(field(job, FEATURE_SLOT_AT) + 8 * index) >= 0
    for number in range(field(job, KEPT)):
        wanted = wanted or load_int64(_kept_part(job, number) + _LAYER) == index
    return wanted


@compiled
def save_features(tasks, job, counter, rows, index):  # type: ignore[no-untyped-def]
    """Copy the residual stream of all rows to the returned features and to heads' pools, where wanted."""
    if not are_wanted(job, index):
        return
    slot = load_int64(field(job, FEATURE_SLOT_AT) + 8 * index)
    width, padded = field(job, HIDDEN), field(job, HIDDEN_PADDED)
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        source = field(job, STATE_AT) + 4 * padded * row
        if slot >= 0:
            target = field(job, FEATURES_AT) + field(job, FEATURES_STRIDE) * row + 4 * width * slot
            for k in range(width):
                store_float(target + 4 * k, load_float(source + 4 * k))
        for number in range(field(job, KEPT)):
            part = _kept_part(job, number)
            if load_int64(part + _LAYER) == index:
                _keep(job, part, row, source, width)


@compiled
def _keep(job, part, row, source, width):  # type: ignore[no-untyped-def]
    """Write a part of a row's feature to the row's KV slot in a head's pool, as bfloat16."""
    request = load_int32(field(job, REQUEST_AT) + 4 * row)
    index = kv_index(job, request, row)
    place = page_of(job, request, index) * PAGE + index % PAGE
    target = load_int64(part + _ADDRESS) + load_int64(part + _STRIDE) * place
    for k in range(width):
        store_word(target + 2 * k, (load_int32(source + 4 * k) + 0x8000) >> 16)
