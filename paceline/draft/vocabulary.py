"""Two vocabularies side by side: which ids of a draft model mean what to its target.

Models of one family share their tokenizer, and an id means the same to both; only the padding at
the end may differ. Other pairs share many token strings under other ids (token-level intersection):
the draft proposes shared tokens only, and reads the rest of the target's tokens spelled out in its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_EVERY: Int64Array = np.empty(0, dtype=np.int64)
MOST_NAMED = 3  # differing ids that an error shows


class TokenTexts(Protocol):
    """The part of a tokenizer that tells what its ids mean."""

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a draft model and its target share."""

    draft_ids: Int32Array  # [shared] ids of the draft
    target_ids: Int32Array  # [shared] the target's ids of the same tokens
    target_size: int  # logits of the target

    def target_logits(self, logits: Float32Array) -> Float32Array:
        """A row of the draft's logits by the target's ids: float32 [target_size]; it may be the row itself.

        What is not shared has -inf.
        """
        if self._is_identity and len(logits) == self.target_size:
            return logits
        row = np.full(self.target_size, -np.inf, dtype=np.float32)
        row[self.target_ids] = logits[self.draft_ids]
        return row

    def known_logits(self, logits: Float32Array) -> tuple[Float32Array, Int64Array]:
        """Logits of what can be guessed, and the target's ids of them; no ids: they are those of all ids.

        From a row of the draft's logits.
        """
        return self.target_logits(logits), _EVERY

    def draft_id(self, token: int) -> int:
        """The draft's id of a shared token of the target's."""
        return token

    @property
    def _is_identity(self) -> bool:
        return self.draft_ids is self.target_ids


@dataclass(frozen=True)
class TrimmedVocabulary(Vocabulary):
    """Some of the target's tokens, which a head numbers from 0."""

    _row: Float32Array  # [target_size] what is given, until the next call; -inf where nothing can be guessed
    _places: Int64Array  # [shared] target_ids as numpy likes to index with: in half the time

    def target_logits(self, logits: Float32Array) -> Float32Array:
        self._row[self._places] = logits
        return self._row

    def known_logits(self, logits: Float32Array) -> tuple[Float32Array, Int64Array]:
        return logits, self._places


def trimmed_vocabulary(target_ids: Int32Array | None, target_size: int) -> Vocabulary:
    """The vocabulary of a head that guesses these ids of the target, in this order; None: all of them."""
    if target_ids is None:
        every = np.arange(target_size, dtype=np.int32)
        return Vocabulary(every, every, target_size)
    own = np.arange(len(target_ids), dtype=np.int32)
    row = np.full(target_size, -np.inf, dtype=np.float32)
    return TrimmedVocabulary(own, target_ids, target_size, row, target_ids.astype(np.int64))


def common_vocabulary(
    target: TokenTexts, draft: TokenTexts, target_size: int, draft_size: int, model: str
) -> Vocabulary:
    """The vocabulary of two models with one tokenizer; ConfigError if an id means two things.

    The sizes are those of the models' logits. Ids that only one tokenizer has are padding.
    """
    differing = []
    for token in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.token_bytes(token), draft.token_bytes(token)
        if ours != theirs and ours and theirs:
            differing.append((token, ours, theirs))
    if differing:
        named = "; ".join(
            f"id {token} is {_shown(ours)} to the target and {_shown(theirs)} to the draft"
            for token, ours, theirs in differing[:MOST_NAMED]
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
    """The tokens that two tokenizers share, and the spelling of all of the target's in the draft's ids."""

    _texts: TokenTexts  # the target's
    _ids: dict[bytes, int]  # the draft's ids of all tokens by what they say
    _pieces: dict[bytes, int]  # the same without special tokens
    _longest: int  # bytes of the longest piece
    _spellings: dict[int, list[int]] = field(default_factory=dict)

    def draft_id(self, token: int) -> int:
        return self.spelling(token)[0]

    def spelling(self, token: int) -> list[int]:
        """The draft's ids that say what one token of the target's says."""
        known = self._spellings.get(token)
        if known is None:
            text = self._texts.token_bytes(token)
            known = [self._ids[text]] if text in self._ids else self._spell(text)
            self._spellings[token] = known
        return known

    def _spell(self, text: bytes) -> list[int]:
        """Pieces that make up a text, the longest first. Bytes that no piece begins with are left out."""
        spelled = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._pieces), None)
            if end is not None:
                spelled.append(self._pieces[text[at:end]])
            at = end or at + 1
        return spelled


def vocabulary_intersection(
    target: TokenTexts, draft: TokenTexts, target_size: int, draft_size: int, model: str
) -> Intersection:
    """The token strings that two tokenizers share, whatever their ids; ConfigError if there are none."""
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


def _ids_by_bytes(tokenizer: TokenTexts, size: int) -> dict[bytes, int]:
    """The id of each token string; of several the last, because byte tokens come before real ones."""
    ids = {tokenizer.token_bytes(token): token for token in range(min(tokenizer.vocab_size, size))}
    ids.pop(b"", None)
    return ids


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", errors="backslashreplace"))
