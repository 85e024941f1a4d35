"""ToyDecoder: the toy model's AsyncDecoder."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from paceline.backends.async_decoding import DecodeOutput, DeviceDraft, DraftedRows, SlotInits
from paceline.core.arrays import BoolArray, Float32Array, Int32Array
from paceline.core.forward import ForwardBatch
from paceline.core.logit_edits import LogitEdits
from paceline.core.request import SamplingNeeds
from paceline.core.token_masks import unpacked
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
    return _sampled(logits.tobytes(), temperature, tuple(truncation), seed, position)


@lru_cache(maxsize=1 << 15)
def _sampled(
    logits: bytes, temperature: float, truncation: tuple[float, ...], seed: int, position: int
) -> int:
    """The token of a row of float32 logits, cached, because tests sample the same tokens again and again."""
    row = np.frombuffer(logits, dtype=np.float32)
    return choose_token_reference(row, temperature, truncation_of(truncation), seed, position)


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

    A pass over masked requests computes its logits at launch too, and samples when it gets its masks. Its
    head drafts anything: what is right depends on the masks.
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
        self._most_drafted = np.zeros(slots, dtype=np.int32)  # [slots]
        self._texts: dict[int, list[int]] = {}  # slot: its tokens, -1 where unknown
        self._written: set[int] = set()  # slots whose texts were written since they joined, or before
        self._edits: dict[int, LogitEdits | None] = {}
        self._since: dict[int, list[int]] = {}  # slot: tokens that it got since it joined
        self._asks_logprobs: dict[int, bool] = {}
        self._fields: dict[int, list[list[float]]] = {}  # slot: fields of its rows in this pass
        self._masked: dict[int, bool] = {}
        self._masks: dict[tuple[int, int], BoolArray] = {}  # (slot, level): of the tokens of this pass
        self._waiting: tuple[list[int], Int32Array] | None = None  # slots and drafted rows
        # (slot, level): the logits of the pass that waits for masks
        self._computed: dict[tuple[int, int], Float32Array] = {}
        self._unread: deque[DecodeOutput | None] = deque()  # None: it waits for masks
        self._found: Int32Array | None = None  # of the pass that waits for masks
        self._by_head: dict[int, int] = {}  # slot: length of its head's chain in this pass; others: by texts
        self._next_slot_pages: dict[
            int, list[int]
        ] = {}  # slot: the pages that the last pass looked up for the next one

    def join(self, requests: SlotInits) -> None:
        slots = requests.slots
        self._tokens[slots], self._lengths[slots] = requests.tokens[:, 1], requests.lengths
        self._limits[slots] = requests.limits
        self._seeds[slots], self._temperatures[slots] = requests.seeds, requests.temperatures
        self._truncation[slots], self._most_drafted[slots] = requests.truncation, requests.most_drafted
        self._next_slot_pages = {}
        for number, slot in enumerate(slots.tolist()):
            self._texts[slot] = [
                -1 if slot not in self._written else token for token in self._texts.get(slot, [])
            ]
            self._written.discard(slot)
            self._edits[slot], self._since[slot] = requests.edits[number], []
            self._asks_logprobs[slot] = bool(requests.logprobs[number])
            self._masked[slot] = bool(requests.masked[number])
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
        needs = SamplingNeeds.TRUNCATION | SamplingNeeds.LOGIT_EDITS | SamplingNeeds.LOGPROBS
        return needs | SamplingNeeds.TOKEN_MASK if self._backend.supports_masks else needs

    @property
    def supports_lookup(self) -> bool:
        return self._backend.supports_lookup

    def has_room(self, draft: DeviceDraft) -> bool:
        return self._backend.has_room

    def launch(
        self,
        slots: Sequence[int],
        page_tables: Int32Array,
        draft: DeviceDraft | None,
        host_drafts: Int32Array | None = None,
    ) -> None:
        assert self._waiting is None, "a pass waits for masks"
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
        if not any(self._masked[slot] for slot in slots):
            self._unread.append(self._run(slots, page_tables, given, found))
            return
        rows = np.full((len(slots), 1 + self._length), -1, dtype=np.int32)
        rows[:, 0] = self._tokens[list(slots)]
        if given is not None:
            rows[:, 1:] = given
        for row, slot in zip(rows, slots, strict=True):
            if slot in self._by_head:
                count = self._by_head[slot]
                row[1 : 1 + count] = (7 * self._lengths[slot] + 5 * np.arange(count)) % self._backend.vocab
        self._by_head = {}
        self._waiting = list(slots), rows
        self._found = found
        self._compute(list(slots), rows, page_tables)
        self._unread.append(None)

    def drafted(self) -> DraftedRows:
        assert self._waiting is not None, "no pass waits for masks"
        return DraftedRows(self._waiting[1], range(-1, self._length))

    def send_masks(self, rows: Int32Array, masks: Sequence[Int32Array]) -> None:
        assert self._waiting is not None, "no pass waits for masks"
        (slots, drafted), self._waiting = self._waiting, None
        places = [(slots[row // (1 + self._length)], row % (1 + self._length)) for row in rows.tolist()]
        assert all(self._masked[slot] for slot, _ in places)
        self._masks = {
            place: unpacked(mask, self._backend.vocab) for place, mask in zip(places, masks, strict=True)
        }
        self._backend.num_masks += len(masks)
        assert self._unread[-1] is None
        self._unread[-1] = self._run(slots, None, drafted[:, 1:], self._found)
        self._masks, self._computed = {}, {}

    def _compute(self, slots: list[int], drafted: Int32Array, page_tables: Int32Array) -> None:
        """Compute the logits of all drafted rows, level by level."""
        self._computed, self._next_slot_pages = {}, {}
        for level in range(drafted.shape[1]):
            rows = [
                row
                for row, slot in enumerate(slots)
                if drafted[row, level] >= 0 and self._lengths[slot] + level < self._limits[slot]
            ]
            if rows:
                chosen = [slots[row] for row in rows]
                positions = self._lengths[chosen] + level
                lines = self._logits_of(chosen, drafted[rows, level], positions, page_tables)
                for slot, line in zip(chosen, lines, strict=True):
                    self._computed[slot, level] = line.copy()

    def _run(
        self,
        slots: Sequence[int],
        page_tables: Int32Array | None,
        given: Int32Array | None,
        found: Int32Array | None,
    ) -> DecodeOutput:
        """Run a pass. `given` [slots, length]: drafted tokens, except of slots with a head's chain. Without
        page tables the logits were computed before."""
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
                tokens[rows, level] = self._pass([slots[row] for row in rows], page_tables, level)
                counts[rows] += 1
        for slot in slots if page_tables is not None else ():  # wrong guesses
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
        if page_tables is not None:
            self._next_slot_pages = {slot: self._next_pages(slot, page_tables) for slot in slots}
        return DecodeOutput(tokens, counts, None if self._length else features, found, fields)

    def _drafted(self, slot: int, draft: DeviceDraft, line: list[int] | None) -> list[int]:
        """The chain of the host's draft for a slot, if it matches the text, else that of prompt lookup."""
        length, options = int(self._lengths[slot]), draft.look_up
        text = self._texts[slot][: length + 1]
        assert -1 not in text, "the decoder lacks tokens of a text"
        budget = min(draft.length, int(self._most_drafted[slot]), int(self._limits[slot]) - 1 - length)
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
        if level > self._most_drafted[slot]:
            return False
        right = slot not in self._by_head or level <= starts[slot] % (1 + self._by_head[slot])
        return bool(right and self._lengths[slot] < self._limits[slot] and -1 not in tokens)

    def _logits_of(
        self, slots: list[int], tokens: Int32Array, positions: Int32Array, page_tables: Int32Array
    ) -> Float32Array:
        """The logits after these tokens, one of each slot."""
        batch = ForwardBatch(
            tokens=tokens,
            positions=positions,
            parents=np.full(len(slots), -1, dtype=np.int32),
            row_offsets=np.arange(len(slots) + 1, dtype=np.int32),
            context_lengths=positions,
            page_tables=np.ascontiguousarray(page_tables[slots]),
            logit_rows=np.arange(len(slots), dtype=np.int32),
            pool=self._pool,
        )
        return self._backend.forward(batch).logits

    def _pass(self, slots: list[int], page_tables: Int32Array | None, level: int) -> Int32Array:
        """The next token of each slot."""
        lines: Sequence[Float32Array] | Float32Array
        if page_tables is None:
            lines = [self._computed[slot, level] for slot in slots]
        else:
            lines = self._logits_of(slots, self._tokens[slots], self._lengths[slots], page_tables)
        self._lengths[slots] += 1
        options = self._temperatures, self._truncation, self._seeds, self._lengths
        chosen = []
        for logits, slot in zip(lines, slots, strict=True):
            edits, raw = self._edits[slot], logits
            if (slot, level) in self._masks:
                logits = np.where(self._masks[slot, level], logits, np.float32(-np.inf))
            if edits is not None:
                logits = edited(logits, edits, self._since[slot], int(self._lengths[slot]))
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
        output = self._unread.popleft()
        assert output is not None, "it waits for masks"
        return output

    def skip(self) -> None:
        self._unread.popleft()

    def drop(self) -> None:
        self._unread.clear()
        self._waiting = None

    def prepare(self, draft: DeviceDraft | None) -> dict[int, float]:
        return {}
