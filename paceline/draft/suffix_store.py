"""Past responses, indexed and bounded, in memory and in a file.

Each is found only by requests of the `cache_salt` that its own request had, as pages of the prefix cache
are. In memory a salt is a number drawn at random, the owner of its tokens in the one index of all.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import zipfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.draft.matching import GAP, NOBODY, SHARED, Int32Array
from paceline.draft.occurrences import Occurrences
from paceline.draft.stored_arrays import stored_arrays
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

PROMPT_TAIL = 32  # prompt tokens kept before a response, if any are: its first tokens are found by them
USUAL_RESPONSE = 256  # tokens of a response that memory is set aside for
VERSION = 2
WITHOUT_SALT = ""  # of requests that give none: they share what they leave
LAST_OWNER = 2**31 - 1  # owners are kept in 32 bits


@dataclass
class Salt:
    """A salt of which responses are kept."""

    owner: int
    responses: int = 0


@dataclass(frozen=True)
class Response:
    """A response that is kept."""

    size: int  # tokens, with the gap behind it
    key: int
    salt: str


class ResponseCache:
    """The newest responses. When there are too many, or too many tokens of them, the oldest go first.

    These bounds are for all salts together, and a salt without responses is forgotten: a client
    that invents salts gets no more memory than one that uses a single salt.
    """

    def __init__(self, levels: Sequence[int], max_responses: int, with_prompts: bool = False) -> None:
        """`with_prompts`: ends of prompts are kept too, in front of the responses to them."""
        self._max_responses = max_responses
        self._max_tokens = max_responses * (PROMPT_TAIL + USUAL_RESPONSE + 1)
        self._with_prompts = with_prompts
        self.occurrences = Occurrences(levels, self._max_tokens)
        self._responses: deque[Response] = deque()  # oldest first
        self._keys: set[int] = set()
        self._salts: dict[str, Salt] = {}
        self._owners: set[int] = set()  # numbers that are taken

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def num_salts(self) -> int:
        """Of how many salts there are responses."""
        return len(self._salts)

    def owner_of(self, salt: str) -> int:
        """Who owns the responses of this salt in `occurrences`; NOBODY if there are none."""
        known = self._salts.get(salt)
        return NOBODY if known is None else known.owner

    def add(self, prompt: Sequence[int], output: Sequence[int], salt: str = WITHOUT_SALT) -> None:
        """Keep a response for requests of this salt, unless they have the same already."""
        if self._max_responses and output:
            before = prompt[-PROMPT_TAIL:] if self._with_prompts else ()
            self._add(np.array([*before, *output, GAP], dtype=np.int32)[-self._max_tokens :], salt)

    def _add(self, entry: Int32Array, salt: str) -> None:
        key = hash((salt, entry.tobytes()))
        if key in self._keys:
            return
        size = len(self.occurrences) + len(entry)
        while len(self._responses) >= self._max_responses or size > self._max_tokens:
            size -= self._drop_oldest()
        own = self._salts.get(salt)
        if own is None:
            own = self._salts[salt] = Salt(self._new_owner(salt))
        own.responses += 1
        self.occurrences.append(entry, own.owner)
        self.occurrences.keep_newest(size)
        self._responses.append(Response(len(entry), key, salt))
        self._keys.add(key)

    def _drop_oldest(self) -> int:
        """Forget the oldest response, and its salt if it was the last of that; how many tokens it had."""
        oldest = self._responses.popleft()
        self._keys.remove(oldest.key)
        own = self._salts[oldest.salt]
        own.responses -= 1
        if not own.responses:
            del self._salts[oldest.salt]
            self._owners.discard(own.owner)
        return oldest.size

    def _new_owner(self, salt: str) -> int:
        """A random number that no other salt has."""
        if salt == WITHOUT_SALT:
            return SHARED
        owner = SHARED
        while owner == SHARED or owner in self._owners:
            owner = secrets.randbelow(LAST_OWNER)
        self._owners.add(owner)
        return owner

    def save(self, path: Path, fingerprint: str) -> None:
        """Write the responses without a salt to a file, in one move: a crash leaves the old file or the new.

        Those with a salt go with the process: no file tells whose they were, or of whom there are some.
        """
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        shared = [response.size for response in self._responses if response.salt == WITHOUT_SALT]
        try:
            with open(temporary, "wb", opener=_for_its_owner) as file:
                np.savez(
                    file,
                    version=np.array(VERSION),
                    fingerprint=np.array(fingerprint),
                    with_prompts=np.array(self._with_prompts),
                    sizes=np.array(shared, dtype=np.int64),
                    tokens=self.occurrences.kept()[self.occurrences.owners() == SHARED],
                )
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ConfigError(
                f"suffix_cache_path {str(path)!r} cannot be written ({error}). Give a file in a folder that "
                "exists and that you may write to."
            ) from error

    def load(self, path: Path, fingerprint: str, vocab_size: int) -> None:
        """Add the responses of a file. ConfigError if it is damaged, another tokenizer's, or has prompts
        that are not to be kept."""
        try:
            with stored_arrays(path) as file:
                version, found = int(file["version"]), str(file["fingerprint"])
                sizes, tokens = file["sizes"], file["tokens"]
                with_prompts = version == 1 or (version == VERSION and bool(file["with_prompts"]))
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise _unreadable(path, f"it is damaged or no such file ({error})") from error
        if version not in (1, VERSION):
            raise _unreadable(path, f"it has version {version}, this paceline reads version {VERSION}")
        if found != fingerprint:
            raise ConfigError(
                f"suffix_cache_path {str(path)!r} was written with another tokenizer. Give each model a file "
                "of its own."
            )
        if with_prompts and not self._with_prompts:
            raise ConfigError(
                f"suffix_cache_path {str(path)!r} has ends of prompts too, which share_suffix_cache "
                "'responses' does not keep. Use share_suffix_cache 'prompts', delete the file to start with "
                "an empty cache, or give another path."
            )
        sound = sizes.ndim == tokens.ndim == 1 and ((sizes > 0) & (sizes <= len(tokens))).all()
        if not sound or sizes.sum() != len(tokens) or ((tokens < GAP) | (tokens >= vocab_size)).any():
            raise _unreadable(path, "its sizes and tokens do not fit together")
        ends = np.cumsum(sizes)
        for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True):
            self._add(tokens[start:end].astype(np.int32)[-self._max_tokens :], WITHOUT_SALT)


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """A text that tells vocabularies apart: two are equal if every id stands for the same bytes."""
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        spelling = tokenizer.token_bytes(token)
        digest.update(len(spelling).to_bytes(4, "little") + spelling)
    return digest.hexdigest()


def _for_its_owner(path: str, flags: int) -> int:
    """Opens a file that other users of the machine may not read: it has what a model answered."""
    return os.open(path, flags, mode=0o600)


class DamagedStoreError(ConfigError):
    """The file of past responses is not one that this version wrote."""


def _unreadable(path: Path, reason: str) -> DamagedStoreError:
    return DamagedStoreError(f"suffix_cache_path {str(path)!r} cannot be used: {reason}")
