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
        self.done: set[str] = set()
        self.answered_tokens = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._cut_half_line()
        self._file.seek(0)
        first = self._file.readline()
        if not first:
            self._write(json.dumps(header).encode() + b"\n")
        elif json.loads(first) != json.loads(json.dumps(header)):
            raise ConfigError(
                f"{path} holds answers of other settings ({first.decode(errors='replace').strip()[:300]}); "
                f"these are {json.dumps(header)}. Give the same settings to go on, or another file."
            )
        for line in self._file:
            row = json.loads(line)
            self.done.add(row["id"])
            self.answered_tokens += len(row["ids"]) - row["answer"]

    def append(self, examples: Iterable[Example]) -> None:
        """Write the examples; they are on disk when this returns."""
        examples = list(examples)
        self._write(b"".join(example.line() for example in examples))
        self.done.update(example.id for example in examples)
        self.answered_tokens += sum(len(example.ids) - example.answer for example in examples)

    def close(self) -> None:
        self._file.close()

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _cut_half_line(self) -> None:
        """Drop what a killed run wrote of its last line."""
        size = self._file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - 65536)
            self._file.seek(start)
            newline = self._file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            self._file.truncate(end)


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
    for path in paths:
        with path.open("rb") as file:
            vocab_sizes.add(_vocab_size(path, file.readline()))
            for number, line in enumerate(file, start=2):
                try:
                    row = json.loads(line)
                    ids, answer = row["ids"][:max_length], int(row["answer"])
                    prompt, segment = str(row["id"]).rsplit("#", 1)[0], str(row["segment"])
                    if len(ids) - answer < 2 or answer < 1:
                        continue
                    tokens.extend(ids)
                except (ValueError, KeyError, TypeError, OverflowError) as error:
                    if not line.endswith(b"\n"):
                        continue  # a run that was killed while it wrote
                    raise ConfigError(f"{path}, line {number} is no example: {error!r}.") from None
                offsets.append(len(tokens))
                answers.append(answer)
                prompts.append(numbers.setdefault(prompt, len(numbers)))
                segments.append(sys.intern(segment))
    if len(vocab_sizes) > 1:
        raise ConfigError(f"The answers are of targets with different vocabularies: {sorted(vocab_sizes)}.")
    if not answers:
        raise ConfigError("There are no answers to train on: each needs at least two answered tokens.")
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
    try:
        with path.open("rb") as file:
            return file.read(20).startswith(b'{"paceline_answers"')
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a file of prompts or answers.") from None
