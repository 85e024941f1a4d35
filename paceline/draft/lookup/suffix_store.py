"""The store of past responses for suffix decoding: indexed, bounded, in memory and in a file.

A response is found only by requests with the same `cache_salt`, as with pages of the prefix cache. In the
index, which all salts share, a salt is a namespace: a random number beside each of its tokens.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import secrets
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.core.arrays import Int32Array
from paceline.draft.lookup.ngram_index import GAP, NO_NAMESPACE, SHARED_NAMESPACE
from paceline.draft.lookup.occurrences import Occurrences
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

Array = npt.NDArray[Any]
MAX_MEMBERS = 16
KINDS = "iubU"  # numpy kinds: integers, booleans, text. No floats (NaN passes every comparison), no objects
PROMPT_TAIL = 32  # prompt tokens stored before a response, so that its first tokens are found by them
USUAL_RESPONSE = 256  # tokens per response that memory is allocated for
VERSION = 2  # of the file format
WITHOUT_SALT = ""  # the salt of requests that give none: they share their responses
MAX_NAMESPACE = 2**31 - 1  # namespaces are int32


@dataclass
class SaltEntry:
    """A salt that has stored responses."""

    namespace: int  # of its tokens in the index
    responses: int = 0  # stored now


@dataclass(frozen=True)
class Response:
    """A stored response."""

    size: int  # tokens, with the gap after it
    key: int  # hash of salt and tokens: equal responses are stored once
    salt: str


class ResponseCache:
    """The newest responses, bounded in number and in tokens; the oldest are evicted first.

    The bounds are for all salts together, and a salt without responses is forgotten: a client that invents
    salts gets no more memory than one that uses a single salt.
    """

    def __init__(self, levels: Sequence[int], max_responses: int, with_prompts: bool = False) -> None:
        """`with_prompts`: the end of the prompt is stored too, before the response to it."""
        self._max_responses = max_responses
        self._max_tokens = max_responses * (PROMPT_TAIL + USUAL_RESPONSE + 1)
        self._with_prompts = with_prompts
        self.occurrences = Occurrences(levels, self._max_tokens)
        self._responses: deque[Response] = deque()  # oldest first
        self._keys: set[int] = set()
        self._salts: dict[str, SaltEntry] = {}
        self._namespaces: set[int] = set()  # numbers in use

    def __len__(self) -> int:
        return len(self._responses)

    def namespace_of(self, salt: str) -> int:
        """The namespace of this salt's responses in `occurrences`; NO_NAMESPACE if it has none."""
        entry = self._salts.get(salt)
        return NO_NAMESPACE if entry is None else entry.namespace

    def add(self, prompt: Sequence[int], output: Sequence[int], salt: str = WITHOUT_SALT) -> None:
        """Store a response for requests of this salt, unless an equal one is stored already."""
        if self._max_responses and output:
            before = prompt[-PROMPT_TAIL:] if self._with_prompts else ()
            self._add(np.array([*before, *output, GAP], dtype=np.int32)[-self._max_tokens :], salt)

    def _add(self, tokens: Int32Array, salt: str) -> None:
        key = hash((salt, tokens.tobytes()))
        if key in self._keys:
            return
        size = len(self.occurrences) + len(tokens)
        while len(self._responses) >= self._max_responses or size > self._max_tokens:
            size -= self._drop_oldest()
        entry = self._salts.get(salt)
        if entry is None:
            entry = self._salts[salt] = SaltEntry(self._new_namespace(salt))
        entry.responses += 1
        self.occurrences.append(tokens, entry.namespace)
        self.occurrences.keep_newest(size)
        self._responses.append(Response(len(tokens), key, salt))
        self._keys.add(key)

    def _drop_oldest(self) -> int:
        """The number of tokens freed by evicting the oldest response, and its salt if that has no other."""
        oldest = self._responses.popleft()
        self._keys.remove(oldest.key)
        entry = self._salts[oldest.salt]
        entry.responses -= 1
        if not entry.responses:
            del self._salts[oldest.salt]
            self._namespaces.discard(entry.namespace)
        return oldest.size

    def _new_namespace(self, salt: str) -> int:
        """A number that no other salt has: random, or SHARED_NAMESPACE for requests without a salt."""
        if salt == WITHOUT_SALT:
            return SHARED_NAMESPACE
        namespace = SHARED_NAMESPACE
        while namespace == SHARED_NAMESPACE or namespace in self._namespaces:
            namespace = secrets.randbelow(MAX_NAMESPACE)
        self._namespaces.add(namespace)
        return namespace

    def save(self, path: Path, fingerprint: str) -> None:
        """Write the responses without a salt to a file, atomically: a crash leaves the old file or the new.

        Responses with a salt are never written: the file must not reveal which salts exist.
        """
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        shared = [response.size for response in self._responses if response.salt == WITHOUT_SALT]
        try:
            with open(temporary, "wb", opener=_open_private) as file:
                np.savez(
                    file,
                    version=np.array(VERSION),
                    fingerprint=np.array(fingerprint),
                    with_prompts=np.array(self._with_prompts),
                    sizes=np.array(shared, dtype=np.int64),
                    tokens=self.occurrences.tokens()[self.occurrences.namespaces() == SHARED_NAMESPACE],
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
        while `with_prompts` is off."""
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
    """A SHA-256 of the vocabulary: equal if every id stands for the same bytes."""
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        spelling = tokenizer.token_bytes(token)
        digest.update(len(spelling).to_bytes(4, "little") + spelling)
    return digest.hexdigest()


def _open_private(path: str, flags: int) -> int:
    """A file descriptor with mode 0600: other users of the machine must not read the responses."""
    return os.open(path, flags, mode=0o600)


class DamagedStoreError(ConfigError):
    """The file of past responses is damaged, or not of a version that we read."""


def _unreadable(path: Path, reason: str) -> DamagedStoreError:
    return DamagedStoreError(f"suffix_cache_path {str(path)!r} cannot be used: {reason}")


@contextmanager
def stored_arrays(path: Path) -> Iterator[Mapping[str, Array]]:
    """The arrays that `numpy.savez` wrote. ValueError, KeyError or BadZipFile if there are none.

    The file is not trusted, as numpy's own reader does: that allocates what a header claims, and decompresses
    without a limit.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            packed = any(
                member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 for member in members
            )
            if packed or len(members) > MAX_MEMBERS or sum(member.file_size for member in members) > size:
                raise ValueError("it claims to hold more than it does")
            yield {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members}


def _array(content: bytes) -> Array:
    """The array of a member. ValueError if its header does not fit its content."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"arrays of version {version} are not read")
    shape, fortran, kind = np.lib.format.read_array_header_1_0(stream)
    rest = memoryview(content)[stream.tell() :]
    if fortran or kind.kind not in KINDS or math.prod(shape) * kind.itemsize != len(rest):
        raise ValueError(f"an array of {shape} {kind} is not what follows")
    return np.frombuffer(rest, dtype=kind).reshape(shape) if kind.itemsize else np.zeros(shape, dtype=kind)
