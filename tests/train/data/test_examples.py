"""The file of answers: appended to, resumed after a kill, refused where settings differ."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.train.data.examples import Example, ExampleWriter, read_examples, windows

FIRST = Example("a-1", "math", [5, 6, 7, 8], 2)
SECOND = Example("a-2", "chat", [1, 2, 3], 1)


def writer(path: Path, temperature: float = 1.0) -> ExampleWriter:
    return ExampleWriter(path, 10, {"temperature": temperature})


def test_written_examples_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    writer(path).append([FIRST, SECOND])
    examples = read_examples([path], max_length=100)
    assert examples.vocab_size == 10
    assert examples.tokens.tolist() == [5, 6, 7, 8, 1, 2, 3]
    assert examples.offsets.tolist() == [0, 4, 7]
    assert examples.answers.tolist() == [2, 1]
    assert examples.segments == ["math", "chat"]
    assert np.flatnonzero(examples.answer_counts()).tolist() == [2, 3, 7, 8]


def test_answers_to_one_prompt_are_known_by_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    names = ["a-1#0", "a-1#1", "a-2#0"]
    writer(path).append([Example(name, "s", [1, 2, 3], 1) for name in names])
    assert read_examples([path], 100).prompts.tolist() == [0, 0, 1]


def test_a_resumed_file_knows_its_ids_and_drops_a_partial_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    writer(path).append([FIRST, SECOND])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])  # killed while it wrote the second
    resumed = writer(path)
    assert resumed.done == {"a-1"}
    assert resumed.answered_tokens == 2
    resumed.append([SECOND])
    assert path.read_bytes() == whole


def test_a_run_killed_before_its_first_line_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    writer(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:17])
    writer(path).close()
    assert path.read_bytes() == whole


def test_a_file_of_another_kind_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear Ada,\nno line end here")
    with pytest.raises(ConfigError, match="begins with 'Dear Ada,'"):
        writer(path)
    assert path.read_text() == "Dear Ada,\nno line end here"


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.jsonl"
    own = writer(path)
    own.append([FIRST])
    whole = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="Its 1 answers are kept: make room"):
        own.append([SECOND])
    assert path.read_bytes() == whole
    assert writer(path).done == {"a-1"}


def test_an_unwritable_folder_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Give another folder"):
        writer(tmp_path / "file" / "answers.jsonl")


def test_a_broken_line_of_a_resumed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    writer(path).append([FIRST])
    with path.open("a") as file:
        file.write('{"id": "a-2"}\n')
    with pytest.raises(ConfigError, match="line 3 is no example"):
        writer(path)


def test_a_partial_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    writer(path).append([FIRST, SECOND])
    path.write_bytes(path.read_bytes()[:-5])
    assert len(read_examples([path], 100)) == 1


def test_answers_with_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    writer(path).append([FIRST])
    with pytest.raises(ConfigError, match="no file of answers with these settings"):
        writer(path, temperature=0.5)


@pytest.mark.parametrize(("size", "answer"), [(8, 3), (9, 3), (30, 1), (30, 20), (31, 7), (30, 28), (30, 6)])
def test_every_answered_token_of_a_long_document_is_learned_once(size: int, answer: int) -> None:
    parts = list(windows(size, answer, max_length=8))
    learned = [token for begin, end, first in parts for token in range(first + 1, end)]
    assert learned == list(range(answer + 1, size))
    assert all(end - begin <= 8 for begin, end, _ in parts)
    assert all(first - begin >= min(first, 3) for begin, _, first in parts), "too little to attend to"
    assert all(0 <= begin < first for begin, _, first in parts)


def test_documents_without_two_answered_tokens_or_without_a_prompt_have_no_parts() -> None:
    assert list(windows(5, 4, 8)) == list(windows(5, 0, 8)) == list(windows(20, 19, 8)) == []


def test_the_parts_of_a_long_answer_are_examples_of_one_prompt(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    long = Example("a-0", "math", [*range(9), *range(9)], 4)
    writer(path).append([long, FIRST])
    examples = read_examples([path], max_length=8)
    assert [examples.ids(part).tolist() for part in range(3)] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [3, 4, 5, 6, 7, 8, 0, 1],
        [6, 7, 8, 0, 1, 2, 3, 4],
    ]
    assert examples.answers[:3].tolist() == [4, 4, 4]
    assert examples.prompts[:4].tolist() == [0, 0, 0, 0]
    assert examples.prompts[-1] == 1


def test_a_file_of_empty_answers_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    writer(path).append([Example("a-1", "s", [1, 2], 2), Example("a-2", "s", [1, 2, 3], 2)])
    with pytest.raises(ConfigError, match="2 were left out, because they have fewer than two"):
        read_examples([path], 100)


@pytest.mark.parametrize("content", ["", "{}\n", "no json\n", '{"paceline_answers": 99}\n'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no file of answers"):
        read_examples([path], 100)


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    writer(path).append([Example("a-1", "math", [1, 2, 10], 1)])
    with pytest.raises(ConfigError, match="outside of 0 to 9"):
        read_examples([path], 100)


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    writer(path).append([FIRST])
    with path.open("a") as file:
        file.write("garbage\n")
    writer_line = path.read_text().count("\n")
    with pytest.raises(ConfigError, match=f"line {writer_line} "):
        read_examples([path], 100)
