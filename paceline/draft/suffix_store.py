"""Past responses, indexed and bounded, in memory and in a file."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.draft.matching import GAP, Int32Array
from paceline.draft.occurrences import Occurrences
from paceline.draft.stored_arrays import stored_arrays
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

PROMPT_TAIL = 32  # prompt tokens kept before a response, so that its first tokens can be found
USUAL_RESPONSE = 256  # tokens of a response that memory is set aside for
VERSION = 1


class ResponseCache:
    """The newest responses. When there are too many, or too many tokens of them, the oldest go first."""

    def __init__(self, levels: Sequence[int], max_responses: int) -> None:
        self._max_responses = max_responses
        self._max_tokens = max_responses * (PROMPT_TAIL + USUAL_RESPONSE + 1)
        self.occurrences = Occurrences(levels, self._max_tokens)
        self._responses: deque[tuple[int, int]] = deque()  # (size, key) of each, oldest first
        self._keys: set[int] = set()

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Keep a response and the end of its prompt, unless the same is kept already."""
        if self._max_responses and output:
            self._add(np.array([*prompt[-PROMPT_TAIL:], *output, GAP], dtype=np.int32)[-self._max_tokens :])

    def _add(self, entry: Int32Array) -> None:
        key = hash(entry.tobytes())
        if key in self._keys:
            return
        size = len(self.occurrences) + len(entry)
        while len(self._responses) >= self._max_responses or size > self._max_tokens:
            oldest_size, oldest_key = self._responses.popleft()
            self._keys.remove(oldest_key)
            size -= oldest_size
        self.occurrences.append(entry)
        self.occurrences.keep_newest(size)
        self._responses.append((len(entry), key))
        self._keys.add(key)

    def save(self, path: Path, fingerprint: str) -> None:
        """Write all responses to a file, in one move: a crash leaves the old file or the new one."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                np.savez(
                    file,
                    version=np.array(VERSION),
                    fingerprint=np.array(fingerprint),
                    sizes=np.array([size for size, _ in self._responses], dtype=np.int64),
                    tokens=self.occurrences.kept(),
                )
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ConfigError(
                f"suffix_cache_path {str(path)!r} cannot be written ({error}). Give a file in a folder that "
                "exists and that you may write to."
            ) from error

    def load(self, path: Path, fingerprint: str, vocab_size: int) -> None:
        """Add the responses of a file. ConfigError if it is damaged or another tokenizer's."""
        try:
            with stored_arrays(path) as file:
                version, found = int(file["version"]), str(file["fingerprint"])
                sizes, tokens = file["sizes"], file["tokens"]
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise _unreadable(path, f"it is damaged or no such file ({error})") from error
        if version != VERSION:
            raise _unreadable(path, f"it has version {version}, this paceline reads version {VERSION}")
        if found != fingerprint:
            raise ConfigError(
                f"suffix_cache_path {str(path)!r} was written with another tokenizer. Give each model a file "
                "of its own."
            )
        sound = sizes.ndim == tokens.ndim == 1 and ((sizes > 0) & (sizes <= len(tokens))).all()
        if not sound or sizes.sum() != len(tokens) or ((tokens < GAP) | (tokens >= vocab_size)).any():
            raise _unreadable(path, "its sizes and tokens do not fit together")
        ends = np.cumsum(sizes)
        for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True):
            self._add(tokens[start:end].astype(np.int32)[-self._max_tokens :])


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """A text that tells vocabularies apart: two are equal if every id stands for the same bytes."""
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        spelling = tokenizer.token_bytes(token)
        digest.update(len(spelling).to_bytes(4, "little") + spelling)
    return digest.hexdigest()


class DamagedStoreError(ConfigError):
    """The file of past responses is not one that this version wrote."""


def _unreadable(path: Path, reason: str) -> DamagedStoreError:
    return DamagedStoreError(f"suffix_cache_path {str(path)!r} cannot be used: {reason}")
