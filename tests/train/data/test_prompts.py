"""Prompts of every supported format are read; bad rows are counted by reason and skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, RequestError
from paceline.train.data import rows as module
from paceline.train.data.prompts import (
    LONGEST_TOKEN,
    Prompt,
    Skipped,
    read_all_prompts,
    read_prompts,
    tokenized,
)

NO_CHARACTERS = "characters that are none: bytes that are no UTF-8, or half a surrogate pair"
USER = {"role": "user", "content": "What is a paceline?"}


def read(path: Path) -> tuple[list[Prompt], Skipped]:
    skipped = Skipped()
    return list(read_prompts(path, skipped)), skipped


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER]}, [USER]),
        ({"messages": [USER, {"role": "assistant", "content": "A line."}]}, [USER]),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
            [{"role": "user", "content": "Hi"}],
        ),
        (
            {"custom_id": "1", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [USER]}},
            [USER],
        ),
        ({"request": {"messages": [USER]}, "response": {"choices": []}}, [USER]),
        ({"request": {"method": "POST", "body": {"messages": [USER]}}}, [USER]),
        ({"model": "m", "input": "What is a paceline?"}, [USER]),
        ({"input": [{**USER, "content": [{"type": "input_text", "text": USER["content"]}]}]}, [USER]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]},
            [{"role": "user", "content": "ab"}],
        ),
    ],
)
def test_every_kind_of_chat_ends_with_its_last_user_turn(
    tmp_path: Path, row: Any, messages: list[Any]
) -> None:
    (prompt,), skipped = read(written(tmp_path, row))
    assert prompt.messages == messages
    assert prompt.id == "rows-1"
    assert not skipped.counts


def test_a_plain_prompt_and_its_segment_are_kept(tmp_path: Path) -> None:
    (prompt,), _ = read(written(tmp_path, {"prompt": "Once", "segment": "tales"}))
    assert (prompt.text, prompt.segment) == ("Once", "tales")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"messages": [', "broken JSON"),
        (b'{"prompt": "a \\x41 b"}', "broken JSON"),  # an escape of another language
        (b'{"prompt": "\xff\xfe"}', NO_CHARACTERS),
        (b'{"prompt": "half a pair: \\ud83d"}', NO_CHARACTERS),
        ({"messages": [USER], "segment": "\ud800"}, NO_CHARACTERS),
        (b'{"prompt": "' + b"a" * (module.MAX_ROW + 5) + b'"}', "too long"),
        (b"[" * 100_000, "broken JSON"),
        (b"7", "not an object"),
        ({"text": "x"}, "none of prompt, messages, conversations, input, turns"),
        ({"prompt": "  "}, "empty"),
        ({"prompt": 3}, "a prompt that is no text"),
        ({"messages": []}, "empty"),
        ({"messages": "hi"}, "messages are no list of objects"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wrong roles"),
        ({"messages": [{"role": "assistant", "content": "x"}, USER]}, "wrong roles"),
        ({"messages": [{"role": "system", "content": "x"}]}, "wrong roles"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content that is no text"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "wrong roles"),
    ],
)
def test_a_bad_row_is_counted_by_its_reason_and_the_others_are_read(
    tmp_path: Path, row: Any, reason: str
) -> None:
    good = {"messages": [USER]}
    prompts, skipped = read(written(tmp_path, good, row, good))
    assert [prompt.id for prompt in prompts] == ["rows-1", "rows-3"]
    assert dict(skipped.counts) == {reason: 1}
    assert skipped.first == {reason: "rows-2"}


ROWS = ['{"prompt": "Grüße \\u0000"}', '{"prompt": "语言"}']


@pytest.mark.parametrize(
    "content",
    [
        "\r\n".join(ROWS).encode(),
        ("\n\n \n" + "\n".join(ROWS)).encode(),
        "\n".join(ROWS).encode("utf-8-sig"),
        "\n".join("\ufeff" + row for row in ROWS).encode(),  # two files with marks, one behind the other
        "\n".join(ROWS).encode("utf-16"),
        "\r\n".join(ROWS).encode("utf-16"),
        f"[{','.join(ROWS)}]".encode("utf-8-sig"),
        f"[{','.join(ROWS)}]".encode("utf-16"),
    ],
)
def test_byte_order_marks_and_line_ends_of_other_systems_are_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    prompts, skipped = read(path)
    assert [prompt.text for prompt in prompts] == ["Grüße \0", "语言"]
    assert not skipped.counts


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"[]", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_prompts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    prompts, skipped = read(path)
    assert not prompts
    assert not skipped.counts


def test_files_of_one_name_do_not_share_ids(tmp_path: Path) -> None:
    for folder in ("monday", "tuesday"):
        (tmp_path / folder).mkdir()
    paths = [written(tmp_path / folder, {"prompt": folder}) for folder in ("monday", "tuesday")]
    prompts = list(read_all_prompts(paths, Skipped()))
    assert [(prompt.id, prompt.text) for prompt in prompts] == [
        ("rows-1", "monday"),
        ("rows(2)-1", "tuesday"),
    ]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_an_array_is_read_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    path = tmp_path / "rows.json"
    path.write_text(
        json.dumps([{"prompt": "ä"}, {"prompt": ""}, {"prompt": "ö"}], ensure_ascii=False, indent=1)
    )
    prompts, skipped = read(path)
    assert [prompt.text for prompt in prompts] == ["ä", "ö"]
    assert dict(skipped.counts) == {"empty": 1}


def test_the_rest_of_a_broken_array_counts_as_one_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "a"}, {"prompt": \\q}, {"prompt": "b"}]')
    prompts, skipped = read(path)
    assert [prompt.text for prompt in prompts] == ["a"]
    assert dict(skipped.counts) == {"broken JSON": 1}


def test_rows_are_read_only_when_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for number in range(100_000):
            file.write(f'{{"prompt": "{number}"}}\n')
    rows = read_prompts(path, Skipped())
    assert [next(rows).text for _ in range(3)] == ["0", "1", "2"]


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        next(read_prompts(tmp_path / "none.jsonl", Skipped()))


class Letters:
    """One token per letter; refuses chats whose first word is 'refuse'."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(
        self, messages: Any, add_generation_prompt: bool = True, tools: Any = None
    ) -> str:
        if messages[0]["content"].startswith("refuse"):
            raise RequestError("no.")
        return "".join(message["content"] for message in messages)


def chats(*contents: str) -> Iterator[Prompt]:
    return iter([Prompt(text, "s", messages=[{"role": "user", "content": text}]) for text in contents])


def test_a_repeated_prompt_is_used_once() -> None:
    skipped = Skipped()
    pairs = list(tokenized(chats("ab", "ba", "ab"), Letters(), 3, skipped))
    assert [ids for _, ids in pairs] == [[97, 98], [98, 97]]
    assert dict(skipped.counts) == {"the same as an earlier prompt": 1}


def test_a_far_too_long_prompt_is_not_tokenized() -> None:
    class NoTime(Letters):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError

    skipped = Skipped()
    assert not list(tokenized(chats("a" * 3 * LONGEST_TOKEN), NoTime(), 3, skipped))
    assert dict(skipped.counts) == {"too long": 1}


def test_prompts_too_long_or_refused_by_the_template_are_counted() -> None:
    skipped = Skipped()
    pairs = list(tokenized(chats("ab", "refuse", "abcdef", "a"), Letters(), 3, skipped))
    assert [ids for _, ids in pairs] == [[97, 98], [97]]
    assert dict(skipped.counts) == {"refused by the chat template": 1, "too long": 1}
    assert skipped.lines()[0].startswith("1 row left out: ")
