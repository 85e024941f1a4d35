"""The file between answering and training: token ids, and which of them are the target's answer.

JSON lines, so that answers of one machine can train a head on another:

    {"paceline_answers": 1, "vocab_size": 49152, "settings": {...}}     the first line
    {"id": "logs-17#0", "segment": "math", "ids": [1, 4093, ...], "answer": 41}

The id names the prompt and, behind #, which of its answers this is. `answer` is the index of the first
answered token; all ids from there on are the target's own, the end-of-sequence token included if the
answer ended by itself. Lines are only ever appended: a run that was killed leaves at most half a line at
the end, which the next one cuts off.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.train.disk import make_folder, writing

VERSION = 1


@dataclass(frozen=True)
class Example:
    """A prompt and the target's answer to it."""

    id: str
    segment: str
    ids: list[int]  # prompt, then answer
    answer: int  # index of the first answered token

    def line(self) -> bytes:
        row = {"id": self.id, "segment": self.segment, "ids": self.ids, "answer": self.answer}
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"


class ExampleWriter:
    """Appends examples to a file, and knows which were written before."""

    def __init__(self, path: Path, vocab_size: int, settings: Mapping[str, Any]) -> None:
        """`settings` is what the answers depend on; a file of other settings is refused."""
        header = {"paceline_answers": VERSION, "vocab_size": vocab_size, "settings": dict(settings)}
        first = json.dumps(header).encode() + b"\n"
        self.done: set[str] = set()
        self.answered_tokens = 0
        self.path = path
        make_folder(path.parent)
        size = self._read(first) if path.exists() else 0
        with writing(path, "Give another file with --out."):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(size)  # half a line, if a killed run left one
        if not size:
            self._write(first)

    def append(self, examples: Iterable[Example]) -> None:
        """Write the examples; they are on disk when this returns."""
        examples = list(examples)
        self._write(b"".join(example.line() for example in examples))
        self.done.update(example.id for example in examples)
        self.answered_tokens += sum(len(example.ids) - example.answer for example in examples)

    def close(self) -> None:
        self._file.close()

    def _read(self, header: bytes) -> int:
        """Take in what the file holds; gives the length of its whole lines."""
        size = 0
        with writing(self.path, "Give another file with --out."), self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                whole = line.endswith(b"\n")
                if number == 1 and line != header and not header.startswith(line):
                    raise ConfigError(
                        f"{self.path} is there already, and is no file of answers with these settings: it "
                        f"begins with {line.decode(errors='replace').strip()[:300]!r}, and these answers "
                        f"with {header.decode().strip()!r}. Give the same settings to go on, or another file."
                    )
                if not whole:
                    break
                size += len(line)
                if number > 1:
                    example = _parsed(self.path, number, line)
                    self.done.add(example.id)
                    self.answered_tokens += len(example.ids) - example.answer
        return size

    def _write(self, content: bytes) -> None:
        """Append to the file, all or nothing."""
        size = self._file.seek(0, os.SEEK_END)
        remedy = f"Its {len(self.done)} answers are kept: make room, and the same command goes on."
        with writing(self.path, remedy):
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[self._file.write(rest) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(size)
                raise


@dataclass(frozen=True)
class Examples:
    """All examples of a file, end to end."""

    vocab_size: int
    tokens: npt.NDArray[np.int32]  # [all tokens]
    offsets: npt.NDArray[np.int64]  # [examples + 1] tokens of example i are offsets[i]:offsets[i + 1]
    answers: npt.NDArray[np.int32]  # [examples] index of the first answered token within the example
    prompts: npt.NDArray[np.int32]  # [examples] number of the prompt: its answers are held out together
    segments: list[str]  # [examples] the kind of traffic

    def __len__(self) -> int:
        return len(self.answers)

    def ids(self, example: int) -> npt.NDArray[np.int32]:
        """Token ids of one example: prompt, then answer."""
        return self.tokens[self.offsets[example] : self.offsets[example + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each example: [examples]."""
        return np.diff(self.offsets)

    def answer_counts(self) -> npt.NDArray[np.int64]:
        """How often each token is answered: [vocab_size]."""
        place = np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], self.lengths)
        answered = self.tokens[place >= np.repeat(self.answers, self.lengths)]
        return np.bincount(answered, minlength=self.vocab_size)


def read_examples(paths: Iterable[Path], max_length: int) -> Examples:
    """The examples of files, each cut to `max_length` tokens; those without two answered tokens left out."""
    tokens, offsets, answers, prompts = array("i"), array("q", [0]), array("i"), array("i")
    segments: list[str] = []
    numbers: dict[str, int] = {}  # of prompts, by their ids
    vocab_sizes = set()
    too_short = 0
    for path in paths:
        with path.open("rb") as file:
            vocab_sizes.add(_vocab_size(path, file.readline()))
            for number, line in enumerate(file, start=2):
                if not line.endswith(b"\n"):
                    break  # a run that was killed while it wrote
                example = _parsed(path, number, line)
                ids = example.ids[:max_length]
                if len(ids) - example.answer < 2 or example.answer < 1:
                    too_short += 1
                    continue
                tokens.extend(ids)
                offsets.append(len(tokens))
                answers.append(example.answer)
                prompt = example.id.rsplit("#", 1)[0]
                prompts.append(numbers.setdefault(prompt, len(numbers)))
                segments.append(sys.intern(example.segment))
    if len(vocab_sizes) > 1:
        raise ConfigError(f"The answers are of targets with different vocabularies: {sorted(vocab_sizes)}.")
    if not answers:
        raise ConfigError(
            f"There are no answers to train on: {too_short} were left out, because they have fewer than two "
            f"answered tokens within the first {max_length} of prompt and answer. Give more prompts, or a "
            "larger --max-length."
        )
    examples = Examples(
        vocab_sizes.pop(),
        np.frombuffer(tokens, dtype=np.int32),
        np.frombuffer(offsets, dtype=np.int64),
        np.frombuffer(answers, dtype=np.int32),
        np.frombuffer(prompts, dtype=np.int32),
        segments,
    )
    if examples.tokens.min() < 0 or examples.tokens.max() >= examples.vocab_size:
        raise ConfigError(f"The answers have token ids outside of 0 to {examples.vocab_size - 1}.")
    return examples


def _parsed(path: Path, number: int, line: bytes) -> Example:
    """The example in a line; ConfigError if there is none."""
    try:
        row = json.loads(line)
        ids = array("i", row["ids"]).tolist()
        return Example(str(row["id"]), str(row["segment"]), ids, int(row["answer"]))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{path}, line {number} is no example ({error!r}): delete that line to go on without it."
        ) from None


def answer_settings(path: Path) -> dict[str, Any]:
    """What the answers of a file depend on besides the prompts: its first line says it."""
    with path.open("rb") as file:
        first = file.readline()
    _vocab_size(path, first)
    return dict(json.loads(first).get("settings") or {})


def _vocab_size(path: Path, first: bytes) -> int:
    try:
        header = json.loads(first)
        if header["paceline_answers"] == VERSION:
            return int(header["vocab_size"])
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"{path} is no file of answers of version {VERSION}: make one by `paceline train answers`."
    )


def is_answers(path: Path) -> bool:
    """Whether a file holds answers, rather than prompts."""
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{path} is no file, and is read more than once: give a file of prompts or answers."
        )
    try:
        with path.open("rb") as file:
            return file.read(20).startswith(b'{"paceline_answers"')
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a file of prompts or answers.") from None
