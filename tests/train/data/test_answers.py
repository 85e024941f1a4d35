"""Answers are the target's own, on disk as soon as their batch is done, and the same after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.train.data.answers import Answerer, Next, Watch, patient, write_answers
from paceline.train.data.examples import ExampleWriter, read_examples
from paceline.train.data.prompts import Prompt, Skipped
from paceline.train.data.self_prompts import before_user_turn, self_written
from tests.toy import VOCAB, ToyTokenizer, toy_engine

TEMPERATURES = (0.0, 1.0)


def prompts(number: int = 5) -> Iterator[tuple[Prompt, list[int]]]:
    return iter([(Prompt(f"p-{one}", "s", text="x"), [one + 1, 2, 3]) for one in range(number)])


def run(path: Path, watch: Watch = patient, max_num_seqs: int = 16) -> None:
    engine = toy_engine(max_num_seqs=max_num_seqs)
    answerer = Answerer(LLM.from_engine(engine, ToyTokenizer()))  # type: ignore[arg-type]
    write_answers(prompts(), answerer, ExampleWriter(path, VOCAB, {}), TEMPERATURES, 8, 0, 10, watch)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_every_prompt_is_answered_at_every_temperature(tmp_path: Path) -> None:
    run(tmp_path / "a.jsonl")
    examples = rows(tmp_path / "a.jsonl")
    assert [row["id"] for row in examples] == [f"p-{one}#{heat}" for one in range(5) for heat in range(2)]
    assert all(row["answer"] == 3 and 3 < len(row["ids"]) <= 11 for row in examples)
    assert any(examples[one]["ids"] != examples[one + 1]["ids"] for one in range(0, 10, 2))


def test_a_stopped_run_keeps_what_is_finished_and_resumed_gives_the_same_examples(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    run(whole)
    run(stopped, lambda answers, tokens: Next.DROP if answers else Next.GO_ON, max_num_seqs=3)
    kept = rows(stopped)
    assert 0 < len(kept) < 10
    assert all(row in rows(whole) for row in kept)
    assert len({row["id"] for row in kept}) == len(kept)
    with stopped.open("r+") as file:  # in another order, as where a later answer is the shorter one
        first, *lines = file.readlines()
        file.seek(0)
        file.writelines([first, *reversed(lines)])
    run(stopped)
    assert len(rows(stopped)) == 10
    assert rows(stopped) != rows(whole)
    before, after = read_examples([whole], 99), read_examples([stopped], 99)
    assert all(
        np.array_equal(getattr(before, name), getattr(after, name))
        for name in ("tokens", "offsets", "answers", "prompts", "segments")
    )


def test_when_time_is_up_answers_end_where_they_are(tmp_path: Path) -> None:
    run(tmp_path / "whole.jsonl")
    run(tmp_path / "cut.jsonl", lambda answers, tokens: Next.CUT if tokens > 5 else Next.GO_ON, 3)
    cut = rows(tmp_path / "cut.jsonl")
    assert len(cut) == 3, "those that had begun"
    for row, whole in zip(cut, rows(tmp_path / "whole.jsonl"), strict=False):
        assert row["id"] == whole["id"]
        assert row["answer"] < len(row["ids"]) < len(whole["ids"])
        assert row["ids"] == whole["ids"][: len(row["ids"])]


class Turns:
    """A tokenizer of letters with a chat template; 0 ends a turn."""

    eos_ids = frozenset({0})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in ids if token)

    def apply_chat_template(
        self, messages: Any, add_generation_prompt: bool = True, tools: Any = None
    ) -> str:
        return f"<user>{messages[0]['content']}</user>"


class Scripted:
    """Answers every start of a turn with the next of its turns."""

    def __init__(self, *turns: str) -> None:
        self.turns = iter(turns)
        self.asked: list[str] = []

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        max_tokens: int,
        watch: Watch = patient,
    ) -> list[list[int] | None]:
        self.asked += ["".join(map(chr, prompt)) for prompt in prompts]
        return [[0 if letter == "." else ord(letter) for letter in next(self.turns)] for _ in prompts]


def test_the_model_writes_prompts_from_its_template_and_from_given_openings() -> None:
    skipped = Skipped()
    model = Scripted("hello.", " a poem.", "and on and on", ".", " .")
    written = list(self_written(Turns(), model, 5, skipped, 0, batch_size=2, openings=("", "Write")))
    assert model.asked[:2] == ["<user>", "<user>Write"]
    contents = [prompt.messages[0]["content"] for prompt in written if prompt.messages]
    assert contents == ["hello", "Write a poem", "Write"]
    assert [prompt.id for prompt in written] == ["self-0", "self-1", "self-3"]
    assert dict(skipped.counts) == {"a self-written prompt that does not end": 1, "empty": 1}


def test_a_template_without_the_users_text_is_a_user_error() -> None:
    class Hidden(Turns):
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "always the same"

    with pytest.raises(ConfigError, match="--data"):
        before_user_turn(Hidden())
