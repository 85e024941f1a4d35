"""The map between the vocabularies of a draft model and its target.

Models of one family share their tokenizer, and an id means the same to both; only the padding at the end may
differ. Other pairs share many token strings under different ids (token-level intersection): the draft model
proposes shared tokens only, and reads the target's other tokens spelled in its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.arrays import Float32Array, Int32Array, Int64Array
from paceline.errors import ConfigError
from paceline.verify.choosing import ALL_IDS

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

MAX_NAMED = 3  # differing ids that an error shows


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a draft model and its target share."""

    draft_ids: Int32Array  # [shared] the draft model's ids
    target_ids: Int32Array  # [shared] the target's ids of the same tokens
    target_size: int  # number of the target's logits

    def target_logits(self, logits: Float32Array) -> Float32Array:
        """A row of the draft model's logits in the order of the target's ids: float32 [target_size].

        It may be the row itself. Tokens that are not shared have -inf.
        """
        if self._is_identity and len(logits) == self.target_size:
            return logits
        row = np.full(self.target_size, -np.inf, dtype=np.float32)
        row[self.target_ids] = logits[self.draft_ids]
        return row

    def known_logits(self, logits: Float32Array) -> tuple[Float32Array, Int64Array]:
        """The logits of the tokens that can be drafted, and their target ids; no ids: all of them."""
        return self.target_logits(logits), ALL_IDS

    def draft_id(self, token: int) -> int:
        """The draft model's id of a shared token, given the target's id."""
        return token

    @property
    def _is_identity(self) -> bool:
        return self.draft_ids is self.target_ids


@dataclass(frozen=True)
class TrimmedVocabulary(Vocabulary):
    """A head's draft vocabulary: some of the target's tokens, numbered from 0."""

    _row: Float32Array  # [target_size] returned by target_logits, valid until the next call; -inf elsewhere
    _target_indices: Int64Array  # [shared] target_ids as int64: indexing takes half the time

    def target_logits(self, logits: Float32Array) -> Float32Array:
        self._row[self._target_indices] = logits
        return self._row

    def known_logits(self, logits: Float32Array) -> tuple[Float32Array, Int64Array]:
        return logits, self._target_indices


def trimmed_vocabulary(target_ids: Int32Array | None, target_size: int) -> Vocabulary:
    """The vocabulary of a head that drafts these target ids, in this order; None: all of them."""
    if target_ids is None:
        all_ids = np.arange(target_size, dtype=np.int32)
        return Vocabulary(all_ids, all_ids, target_size)
    draft_ids = np.arange(len(target_ids), dtype=np.int32)
    row = np.full(target_size, -np.inf, dtype=np.float32)
    return TrimmedVocabulary(draft_ids, target_ids, target_size, row, target_ids.astype(np.int64))


def common_vocabulary(
    target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int, model: str
) -> Vocabulary:
    """The vocabulary of two models with one tokenizer; ConfigError if an id means different bytes.

    The sizes are those of the models' logits. Ids that only one tokenizer has are padding.
    """
    differing = []
    for token in range(min(target.vocab_size, draft.vocab_size)):
        target_bytes, draft_bytes = target.token_bytes(token), draft.token_bytes(token)
        if target_bytes != draft_bytes and target_bytes and draft_bytes:
            differing.append((token, target_bytes, draft_bytes))
    if differing:
        named = "; ".join(
            f"id {token} is {_shown(target_bytes)} to the target and {_shown(draft_bytes)} to the draft"
            for token, target_bytes, draft_bytes in differing[:MAX_NAMED]
        )
        raise ConfigError(
            f"the draft model {model!r} has another vocabulary than the target: {len(differing)} ids differ "
            f"({named}). Use a draft model with the target's tokenizer, or set use_heterogeneous_vocab to "
            "draft with the tokens they share."
        )
    shared = np.arange(min(target_size, draft_size), dtype=np.int32)
    return Vocabulary(shared, shared, target_size)


@dataclass(frozen=True)
class Intersection(Vocabulary):
    """The tokens that two tokenizers share, and the spelling of the target's tokens in the draft model's."""

    _texts: Tokenizer  # the target's
    _ids: dict[bytes, int]  # the draft model's id of each token, by its bytes
    _pieces: dict[bytes, int]  # the same without special tokens
    _longest: int  # bytes of the longest piece
    _spellings: dict[int, list[int]] = field(default_factory=dict)

    def draft_id(self, token: int) -> int:
        return self.spelling(token)[0]

    def spelling(self, token: int) -> list[int]:
        """The draft model's ids for the bytes of one target token."""
        spelling = self._spellings.get(token)
        if spelling is None:
            text = self._texts.token_bytes(token)
            spelling = [self._ids[text]] if text in self._ids else self._spell(text)
            self._spellings[token] = spelling
        return spelling

    def _spell(self, text: bytes) -> list[int]:
        """The ids of a text's pieces, greedily the longest. Bytes that no piece starts with are dropped."""
        spelled = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._pieces), None)
            if end is not None:
                spelled.append(self._pieces[text[start:end]])
            start = end or start + 1
        return spelled


def vocabulary_intersection(
    target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int, model: str
) -> Intersection:
    """The tokens that two tokenizers share by their bytes; ConfigError if there are none."""
    targets = _ids_by_bytes(target, target_size)
    drafts = _ids_by_bytes(draft, draft_size)
    shared = [text for text in drafts if text in targets]
    if not shared:
        raise ConfigError(
            f"the draft model {model!r} shares no token with the target. Use a draft model with the "
            "target's tokenizer, or another method."
        )
    pieces = {text: token for text, token in drafts.items() if not draft.is_special(token)}
    return Intersection(
        np.array([drafts[text] for text in shared], dtype=np.int32),
        np.array([targets[text] for text in shared], dtype=np.int32),
        target_size,
        target,
        drafts,
        pieces,
        max(map(len, pieces), default=0),
    )


def _ids_by_bytes(tokenizer: Tokenizer, size: int) -> dict[bytes, int]:
    """The id of each token's bytes; of several the last, because byte tokens come before merged ones."""
    ids = {tokenizer.token_bytes(token): token for token in range(min(tokenizer.vocab_size, size))}
    ids.pop(b"", None)
    return ids


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", errors="backslashreplace"))
