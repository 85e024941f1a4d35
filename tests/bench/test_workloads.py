"""Workloads: prompts from JSON Lines, and mistakes named by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.run.contest import with_follow_ups
from paceline.bench.servers.endpoints import served_task
from paceline.bench.traffic.builtin_workloads import BUILT_IN
from paceline.bench.traffic.workloads import DEFAULT_MAX_TOKENS, load_workload
from paceline.errors import ConfigError
from tests.serve.echo import byte_tokenizer
from tests.toy import ToyTokenizer

CHAT = [{"role": "user", "content": "hello"}]


def write(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_lines_are_chats_or_texts_with_defaults_for_what_they_leave_out(tmp_path: Path) -> None:
    name = write(
        tmp_path / "mine.jsonl",
        {"id": "a", "segment": "chat", "messages": CHAT, "max_tokens": 5, "made_by": "another tool"},
        "",
        {"prompt": "once"},
    )
    workload = load_workload(name)
    assert workload.name == "mine"
    chat, text = workload.prompts
    assert (chat.id, chat.segment, chat.max_tokens) == ("a", "chat", 5)
    assert (text.id, text.segment, text.max_tokens) == ("3", "mine", DEFAULT_MAX_TOKENS)
    tokenizer = ToyTokenizer()
    assert chat.token_ids(tokenizer) == tokenizer.encode(tokenizer.apply_chat_template(CHAT), False)
    assert text.token_ids(tokenizer) == tokenizer.encode("once")


def test_a_response_format_says_what_form_the_answer_has(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats = [
        {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}},
        {"type": "json_object"},
        {"type": "text"},
        None,
    ]
    lines = [{"prompt": "x", "response_format": given} for given in formats]
    prompts = load_workload(write(tmp_path / "w.jsonl", *lines), max_tokens=9).prompts
    assert [prompt.structured_outputs for prompt in prompts] == [
        {"json": schema},
        {"json_object": True},
        None,
        None,
    ]


def test_a_limit_keeps_the_first_and_max_tokens_only_lowers(tmp_path: Path) -> None:
    name = write(tmp_path / "w.jsonl", *({"prompt": "x", "max_tokens": count} for count in (10, 50, 90)))
    workload = load_workload(name, limit=2, max_tokens=20)
    assert [prompt.max_tokens for prompt in workload.prompts] == [10, 20]


def test_variables_of_the_chat_template_reach_it_here_and_at_a_server(tmp_path: Path) -> None:
    variables = {"enable_thinking": False}
    row = {"messages": CHAT, "chat_template_kwargs": variables}
    (prompt,) = load_workload(write(tmp_path / "w.jsonl", row)).prompts
    tokenizer = byte_tokenizer("{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}")
    assert tokenizer.decode(prompt.token_ids(tokenizer)) == "hello!"
    assert served_task(prompt, "m", 0, 0.0, True).body["chat_template_kwargs"] == variables


SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
    {"question_id": 82, "category": "coding", "turns": ["Code.", "Test it."], "reference": ["", ""]},
    {"question_id": 161, "category": "translation", "turns": ["Translate."]},
]


def test_a_spec_bench_file_has_its_tasks_as_segments_and_its_later_turns_behind_answers(tmp_path) -> None:
    workload = load_workload(write(tmp_path / "question.jsonl", *SPEC_BENCH))
    assert [(prompt.id, prompt.segment, prompt.max_tokens) for prompt in workload.prompts] == [
        ("81", "mt_bench", 1024),
        ("82", "mt_bench", 1024),
        ("161", "translation", 1024),
    ]
    asked = with_follow_ups(workload, lambda turns: [f"answer to {prompt.id}" for prompt in turns.prompts])
    assert len(asked.prompts) == asked.num_requests == workload.num_requests == 5
    assert [prompt.id for prompt in asked.prompts] == ["81", "81+", "82", "82+", "161"]
    assert [message["content"] for message in asked.prompts[3].messages or ()] == [
        "Code.",
        "answer to 82",
        "Test it.",
    ]


def test_a_line_ends_at_a_line_feed_only_whatever_its_texts_hold(tmp_path) -> None:
    """Arena-Hard's prompts, in DeepSpec's file, hold U+2028; other files begin with a byte order mark."""
    turns = ["a\u2028b\x85c\x0cd"]
    text = "".join(json.dumps({"turns": turns}, ensure_ascii=False) + end for end in ("\n", "\r\n", "\n"))
    (tmp_path / "w.jsonl").write_text("\ufeff" + text, encoding="utf-8", newline="")
    prompts = load_workload(str(tmp_path / "w.jsonl")).prompts
    assert [(prompt.id, prompt.messages) for prompt in prompts] == [
        (number, [{"role": "user", "content": turns[0]}]) for number in ("1", "2", "3")
    ]


def test_a_limit_is_of_each_task_of_a_file(tmp_path) -> None:
    workload = load_workload(write(tmp_path / "question.jsonl", *SPEC_BENCH), limit=1)
    assert [prompt.id for prompt in workload.prompts] == ["81", "161"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2: no JSON"),
        ([1], "line 2: expected an object"),
        ({"id": "x"}, "line 2: give either messages .* or prompt"),
        ({"prompt": "a", "messages": CHAT}, "line 2: give either"),
        ({"prompt": ""}, "line 2: prompt must be a text"),
        ({"messages": "hello"}, "line 2: messages must be a list"),
        ({"messages": [{"role": "user"}]}, "line 2: messages must be a list"),
        ({"messages": CHAT, "chat_template_kwargs": "x"}, "line 2: chat_template_kwargs must be an object"),
        ({"prompt": "a", "max_tokens": 1}, "line 2: max_tokens must be an integer of at least 2"),
        ({"prompt": "a", "max_tokens": "many"}, "line 2: max_tokens"),
        ({"prompt": "a", "response_format": {"schema": {}}}, "line 2: response_format must be"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "line 2: response_format must be"),
        ({"prompt": "a", "response_format": "json"}, "line 2: response_format must be"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: Any, message: str) -> None:
    name = write(tmp_path / "w.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ConfigError, match=message):
        load_workload(name)


def test_a_file_for_training_can_be_measured_with_too(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    rows = [
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "an old answer"}]},
        {"input": "hello"},
        {"id": "log-1", "segment": "logs", "body": {"messages": chat, "max_tokens": 9}},
    ]
    prompts = load_workload(write(tmp_path / "w.jsonl", *rows)).prompts
    assert [prompt.messages for prompt in prompts] == [chat] * 3
    assert [(prompt.id, prompt.segment) for prompt in prompts] == [("1", "w"), ("2", "w"), ("log-1", "logs")]
    assert prompts[2].max_tokens == 9


def test_an_invalid_workload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a file nor built in.*code-edit"):
        load_workload("no such workload")
    with pytest.raises(ConfigError, match=r"'chatt' .*did you mean 'chat'\? Give --workload"):
        load_workload("chatt")
    with pytest.raises(
        ConfigError, match=r"row\.jsonl, line 1: give either messages .* has 'text', 'tokens'"
    ):
        load_workload(write(tmp_path / "row.jsonl", {"text": "hello", "tokens": 3}))
    with pytest.raises(ConfigError, match="has no prompts"):
        load_workload(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_workload(str(tmp_path / "binary.jsonl"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_workloads_are_made_here_and_always_the_same(name: str) -> None:
    workload = load_workload(name)
    assert workload == load_workload(name)
    assert len(workload.prompts) >= 8
    assert len({prompt.id for prompt in workload.prompts}) == len(workload.prompts)
    contents = {prompt.messages[0]["content"] for prompt in workload.prompts if prompt.messages}
    assert len(contents) == len(workload.prompts)
    assert all(30 < len(content) < 3000 for content in contents)
