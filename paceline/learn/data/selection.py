"""Which rows of a store train a head, and which end its training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.errors import ConfigError
from paceline.learn.data.rows import TrafficRow
from paceline.learn.data.split import Side, side_of, unit_hash
from paceline.train.data.examples import Examples, read_examples

NEW, OLD = "new", "old"  # rows since the last training, and rows against forgetting
ALL_SALTS = "all"
MIN_TRAIN, MIN_STOP = 16, 4  # rows
MIN_OLD = 8  # held-back old rows; fewer are too noisy to say that a head forgets
MAX_STOP = 32  # rows of a group; they are measured several times
MIN_LOOP, LOOP_SHARE = 32, 0.9  # an answer of at least 32 tokens of which 0.9 are the same token is a loop


@dataclass(frozen=True)
class Selection:
    """Which rows of a store are used."""

    since: float = 0.0  # rows that finished at this time or later are new
    replay: float = 0.4  # share of old rows among those trained on, if there are as many
    salt: str = ""  # rows of this salt's hash; empty: rows without a salt; all: every row
    max_rows: int = 20_000  # new ones; the newest are taken
    max_length: int = 1024  # tokens of prompt and answer; what is longer is cut off


@dataclass(frozen=True)
class Chosen:
    """The selected rows, by their use."""

    train: list[TrafficRow]
    stop: Mapping[str, list[TrafficRow]] = field(default_factory=dict)  # by NEW and OLD; never trained on
    replayed: int = 0  # rows of `train` that are old

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of rows, for reports."""
        held_back = {f"stop_{name}": len(rows) for name, rows in self.stop.items()}
        return {"train": len(self.train), "replayed": self.replayed, **held_back}


def usable(row: TrafficRow, salt: str, max_length: int) -> bool:
    """Whether a row may train or judge the head of this salt: see Selection.

    Loops of one token are left out: they are easy to draft, so a head that learns them seems to gain.
    """
    allowed = salt == ALL_SALTS or row.salt == salt
    fits = 1 <= len(row.prompt_ids) <= max_length - 2 and len(row.output_ids) >= 2
    return allowed and fits and not _is_loop(row.output_ids)


def _is_loop(answer: Sequence[int]) -> bool:
    if len(answer) < MIN_LOOP:
        return False
    ((_, most),) = Counter(answer).most_common(1)
    return most >= LOOP_SHARE * len(answer)


def choose(rows: Iterable[TrafficRow], generic: Sequence[TrafficRow], selection: Selection) -> Chosen:
    """The rows to train on and to stop by. `generic` rows count as old, whatever their time.

    ConfigError if there are too few.
    """
    groups: dict[str, list[TrafficRow]] = {NEW: [], OLD: list(generic)}
    for row in rows:
        if usable(row, selection.salt, selection.max_length):
            groups[NEW if row.time >= selection.since else OLD].append(row)
    groups[NEW] = groups[NEW][-selection.max_rows :]
    new, old = (_on_side(groups[name], Side.TRAIN) for name in (NEW, OLD))
    number = int(len(new) * selection.replay / (1 - selection.replay))
    replayed = sorted(old, key=lambda row: _place("replay", row))[:number]
    stop = {
        name: sorted(_on_side(group, Side.STOP), key=lambda row: _place("stop", row))[:MAX_STOP]
        for name, group in groups.items()
    }
    if len(new) < MIN_TRAIN or len(stop[NEW]) < MIN_STOP:
        raise ConfigError(
            f"There are too few rows to learn from: {len(new)} to train on and {len(stop[NEW])} held back, "
            f"of {len(groups[NEW])} that can be used. At least {MIN_TRAIN} and {MIN_STOP} are needed: let "
            "the server collect more, or give an earlier --since."
        )
    if len(stop[OLD]) < MIN_OLD:
        del stop[OLD]
    return Chosen(new + replayed, stop, len(replayed))


def examples_of(rows: Sequence[TrafficRow], vocab_size: int, max_length: int) -> Examples:
    """The rows as training examples, in their order; all answers to one prompt have one number."""
    sequences = [np.array((row.prompt_ids + row.output_ids)[:max_length], dtype=np.int32) for row in rows]
    numbers: dict[tuple[int, ...], int] = {}
    return Examples(
        vocab_size,
        np.concatenate(sequences),
        np.cumsum([0, *map(len, sequences)]),
        np.array([len(row.prompt_ids) for row in rows], dtype=np.int32),
        np.array([numbers.setdefault(row.prompt_ids, len(numbers)) for row in rows], dtype=np.int32),
        [row.segment for row in rows],
    )


def generic_rows(paths: Sequence[Path], vocab_size: int, max_length: int) -> list[TrafficRow]:
    """The answers in files of `paceline train answers`, as rows."""
    if not paths:
        return []
    examples = read_examples(paths, max_length)
    if examples.vocab_size != vocab_size:
        raise ConfigError(
            f"The answers of --generic are of a target with {examples.vocab_size} tokens, not of this one, "
            f"which has {vocab_size}: let it answer them by `paceline train answers`."
        )
    rows = []
    for index, answer in enumerate(examples.answers.tolist()):
        ids = examples.ids(index).tolist()
        rows.append(TrafficRow(tuple(ids[:answer]), tuple(ids[answer:]), examples.segments[index]))
    return rows


def _on_side(rows: Iterable[TrafficRow], side: Side) -> list[TrafficRow]:
    return [row for row in rows if side_of(row.prompt_ids) is side]


def _place(purpose: str, row: TrafficRow) -> float:
    return unit_hash(purpose, row.prompt_ids + row.output_ids)
