"""ToyDecoder: the toy model's AsyncDecoder."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.backends.async_decoding import DecodeOutput, DeviceDraft, SlotInits
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import ForwardBatch
from paceline.core.logit_edits import LogitEdits
from paceline.core.request import SamplingNeeds
from paceline.core.truncation import NUM_FIELDS
from paceline.verify import logprobs
from paceline.verify.kernels import log_normalizer
from tests.draft.reference import host_draft_chain, ngram_chain
from tests.verify.reference import choose_token_reference
from tests.verify.truncations import truncation_of

if TYPE_CHECKING:
    from tests.toy import ToyBackend, ToyPool


def reference_token(
    logits: Float32Array, temperature: float, truncation: Sequence[float], seed: int, position: int
) -> int:
    """The token that the reference samples, or -1 if logits are NaN. `truncation` is a row of SlotInits."""
    if temperature == 0:
        return -1 if np.isnan(logits).any() else int(logits.argmax())
    return choose_token_reference(logits, temperature, truncation_of(truncation), seed, position)


def edited(logits: Float32Array, edits: LogitEdits, since: Sequence[int], position: int) -> Float32Array:
    """The logits of a token at `position` with the edits of a request that got tokens `since` it joined."""
    logits, one = logits.copy(), np.float32(1)
    logits[edits.bias_ids] += edits.bias
    if position < edits.min_length:
        logits[edits.ending_ids] = -np.inf
    repetition, frequency, presence = (np.float32(penalty) for penalty in edits.penalties)
    counts = dict(zip(edits.output_ids.tolist(), edits.output_counts.tolist(), strict=True))
    for token in since:
        counts[token] = counts.get(token, 0) + 1
    for token in {*edits.seen_ids.tolist(), *counts}:
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token, count in counts.items():
        logits[token] = logits[token] - frequency * np.float32(count) - presence * one
    return logits


def logprob_fields(logits: Float32Array, token: int) -> list[float]:
    """The fields of verify/logprobs.py for a row."""
    likely = np.argsort(-logits, kind="stable")[: logprobs.FIRST_LOGIT - logprobs.FIRST_ID]
    missing = [-1] * (logprobs.FIRST_LOGIT - logprobs.FIRST_ID - len(likely))
    rank = int((logits > logits[token]).sum()) + 1
    own = [log_normalizer(logits, float(logits.max())), float(logits[token]), rank]
    return [*own, *likely.tolist(), *missing, *logits[likely].tolist(), *missing]


class ToyDecoder:
    """An AsyncDecoder whose passes run at launch, and are read later.

    Its drafts are chains of `length` that are right up to a depth that depends on the position (a head), or
    the host's drafts where they match the text, or what a plain search finds in the text; if a head looks up
    too, its chains are used where nothing is found. Rejected guesses
    are written too, as on a device, and each pass looks up the pages of the next one.
    """

    def __init__(self, backend: ToyBackend, pool: ToyPool, slots: int, layers: int) -> None:
        self._backend, self._pool, self._layers, self._length = backend, pool, layers, 0
        self._rows = 1  # of a slot in this pass: of a tree, more than the tokens that it can give
        self._tokens = np.zeros(slots, dtype=np.int32)  # [slots]
        self._lengths = np.zeros(slots, dtype=np.int32)  # [slots]
        self._limits = np.zeros(slots, dtype=np.int32)  # [slots]
        self._seeds = np.zeros(slots, dtype=np.uint64)  # [slots]
        self._temperatures = np.zeros(slots)  # [slots]
        self._truncation = np.zeros((slots, NUM_FIELDS))  # [slots, NUM_FIELDS]
        self._takes_drafts = np.ones(slots, dtype=np.bool_)  # [slots]
        self._texts: dict[int, list[int]] = {}  # slot: its tokens, -1 where unknown
        self._written: set[int] = set()  # slots whose texts were written since they joined, or before
        self._edits: dict[int, LogitEdits | None] = {}
        self._since: dict[int, list[int]] = {}  # slot: tokens that it got since it joined
        self._asks_logprobs: dict[int, bool] = {}
        self._fields: dict[int, list[list[float]]] = {}  # slot: fields of its rows in this pass
        self._unread: deque[DecodeOutput] = deque()
        self._by_head: dict[int, int] = {}  # slot: length of its head's chain in this pass; others: by texts
        self._next_slot_pages: dict[
            int, list[int]
        ] = {}  # slot: the pages that the last pass looked up for the next one

    def join(self, requests: SlotInits) -> None:
        slots = requests.slots
        self._tokens[slots], self._lengths[slots] = requests.tokens[:, 1], requests.lengths
        self._limits[slots] = requests.limits
        self._seeds[slots], self._temperatures[slots] = requests.seeds, requests.temperatures
        self._truncation[slots], self._takes_drafts[slots] = requests.truncation, requests.takes_drafts
        self._next_slot_pages = {}
        for number, slot in enumerate(slots.tolist()):
            self._texts[slot] = [
                -1 if slot not in self._written else token for token in self._texts.get(slot, [])
            ]
            self._written.discard(slot)
            self._edits[slot], self._since[slot] = requests.edits[number], []
            self._asks_logprobs[slot] = bool(requests.logprobs[number])
            for back in (1, 0):
                self._write(
                    slot, int(requests.lengths[number]) - back, int(requests.tokens[number, 1 - back])
                )

    def write_texts(self, slots: Sequence[int], texts: Sequence[Int32Array]) -> None:
        self._written.update(slots)
        for slot, text in zip(slots, texts, strict=True):
            for index, token in enumerate(text.tolist()):
                self._write(slot, index, token)

    def _write(self, slot: int, index: int, token: int) -> None:
        """Write a token of a slot's text; what was never written before it is unknown."""
        text = self._texts.setdefault(slot, [])
        text += [-1] * (index + 1 - len(text))
        text[max(index, 0)] = token

    @property
    def supported_sampling(self) -> SamplingNeeds:
        return SamplingNeeds.TRUNCATION | SamplingNeeds.LOGIT_EDITS | SamplingNeeds.LOGPROBS

    @property
    def supports_lookup(self) -> bool:
        return self._backend.supports_lookup

    def launch(
        self,
        slots: Sequence[int],
        page_tables: Int32Array,
        draft: DeviceDraft | None,
        host_drafts: Int32Array | None = None,
    ) -> None:
        self._backend.num_launched += 1
        before, self._length = self._rows, 0 if draft is None else draft.length
        self._rows = 1 + (self._length if draft is None or not draft.nodes else draft.nodes)
        given, found, lines = None, None, [None] * len(slots) if host_drafts is None else host_drafts.tolist()
        by_head = 0 if draft is None or draft.from_texts else draft.network_length or draft.length
        self._by_head = dict.fromkeys(slots, by_head) if by_head else {}
        if draft is not None and draft.reads_texts:
            assert (host_drafts is not None) == (draft.host_tokens > 0)
            given = np.full((len(slots), draft.length), -1, dtype=np.int32)  # matches no token
            chains = [self._drafted(slot, draft, line) for slot, line in zip(slots, lines, strict=True)]
            for line, chain in zip(given, chains, strict=True):
                line[: len(chain)] = chain
            found = np.array([len(chain) for chain in chains], dtype=np.int32)
            self._by_head = {
                slot: by_head for slot, count in zip(slots, found, strict=True) if not count and by_head
            }
        if list(slots) == list(self._next_slot_pages) and self._rows == before:
            assert {slot: self._next_pages(slot, page_tables) for slot in slots} == self._next_slot_pages
        starts = self._lengths.copy()
        tokens = np.full((len(slots), 1 + self._length), -999, dtype=np.int32)
        counts = np.zeros(len(slots), dtype=np.int32)
        self._fields = {slot: [] for slot in slots}
        for level in range(1 + self._length):
            rows = [row for row, slot in enumerate(slots) if self._goes_on(slot, starts, level, tokens[row])]
            if given is not None and level:
                rows = [
                    row
                    for row in rows
                    if slots[row] in self._by_head or (given[row, :level] == tokens[row, :level]).all()
                ]
            if rows:
                tokens[rows, level] = self._pass([slots[row] for row in rows], page_tables)
                counts[rows] += 1
        for slot in slots:  # wrong guesses
            for index in range(self._lengths[slot], min(starts[slot] + self._rows, self._limits[slot])):
                first_slot = self._page(slot, index, page_tables) * self._backend.page_size
                self._pool.tokens[first_slot + index % self._backend.page_size] = -999
        features = np.repeat(tokens.astype(np.float32), self._layers, axis=1) if self._layers else None
        fields = None
        if any(self._asks_logprobs[slot] for slot in slots):
            fields = np.full((len(slots), 1 + self._length, logprobs.NUM_FIELDS), np.nan)
            for row, slot in enumerate(slots):
                for level, line in enumerate(self._fields[slot]):
                    fields[row, level] = line
        self._unread.append(DecodeOutput(tokens, counts, None if self._length else features, found, fields))
        self._next_slot_pages = {slot: self._next_pages(slot, page_tables) for slot in slots}

    def _drafted(self, slot: int, draft: DeviceDraft, line: list[int] | None) -> list[int]:
        """The chain of the host's draft for a slot, if it matches the text, else that of prompt lookup."""
        length, options = int(self._lengths[slot]), draft.look_up
        text = self._texts[slot][: length + 1]
        assert -1 not in text, "the decoder lacks tokens of a text"
        budget = min(draft.length, int(self._limits[slot]) - 1 - length) if self._takes_drafts[slot] else 0
        chain: list[int] = []
        if line is not None:
            assert len(line) == 1 + draft.host_tokens
            expected = [token for token in line[1:] if token >= 0]
            assert line[1:] == [*expected, *[-1] * (draft.host_tokens - len(expected))]
            chain = host_draft_chain(text, line[0], expected, max(budget, 0))
        if not chain and options is not None:
            chain = ngram_chain(text, options.shortest, options.longest, max(budget, 0))
        return chain

    def _goes_on(self, slot: int, starts: Int32Array, level: int, tokens: Int32Array) -> bool:
        """Whether a slot's chain was right down to here."""
        if level and not self._takes_drafts[slot]:
            return False
        right = slot not in self._by_head or level <= starts[slot] % (1 + self._by_head[slot])
        return bool(right and self._lengths[slot] < self._limits[slot] and -1 not in tokens)

    def _pass(self, slots: list[int], page_tables: Int32Array) -> Int32Array:
        rows = np.arange(len(slots), dtype=np.int32)
        output = self._backend.forward(
            ForwardBatch(
                tokens=self._tokens[slots],
                positions=self._lengths[slots],
                parents=np.full(len(slots), -1, dtype=np.int32),
                row_offsets=np.arange(len(slots) + 1, dtype=np.int32),
                context_lengths=self._lengths[slots],
                page_tables=np.ascontiguousarray(page_tables[slots]),
                logit_rows=rows,
                pool=self._pool,
            )
        )
        self._lengths[slots] += 1
        options = self._temperatures, self._truncation, self._seeds, self._lengths
        chosen = []
        for logits, slot in zip(output.logits, slots, strict=True):
            edits, raw = self._edits[slot], logits
            if edits is not None:
                logits = edited(raw, edits, self._since[slot], int(self._lengths[slot]))
            chosen.append(reference_token(logits, *(of_slots[slot].tolist() for of_slots in options)))
            self._since[slot].append(chosen[-1])
            if self._asks_logprobs[slot] and chosen[-1] >= 0:
                self._fields[slot].append(logprob_fields(raw, chosen[-1]))
        self._tokens[slots] = np.maximum(chosen, 0)
        for slot, token in zip(slots, self._tokens[slots].tolist(), strict=True):
            self._write(slot, int(self._lengths[slot]), token)
        return np.array(chosen, dtype=np.int32)

    def _next_pages(self, slot: int, page_tables: Int32Array) -> list[int]:
        """The pages that the next pass of a slot writes to."""
        length = self._lengths[slot]
        ends = min(length + self._rows, self._limits[slot])
        return [self._page(slot, index, page_tables) for index in range(length, ends)]

    def _page(self, slot: int, index: int, page_tables: Int32Array) -> int:
        page = int(page_tables[slot, index // self._backend.page_size])
        assert page >= 0, "an index without a page"
        return page

    def read(self) -> DecodeOutput:
        return self._unread.popleft()

    def skip(self) -> None:
        self._unread.popleft()

    def drop(self) -> None:
        self._unread.clear()

    def prepare(self, draft: DeviceDraft | None) -> dict[int, float]:
        return {}
