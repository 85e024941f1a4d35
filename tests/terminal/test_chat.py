"""The terminal chat: its memory, what stops it, and its error messages."""

from __future__ import annotations

import io
import json
import signal
import sys

import pytest

from paceline import LLM, SamplingParams
from paceline.control.controller import FixedController
from paceline.core.trees import DraftPlan
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.errors import BackendError
from paceline.terminal import chat as chat_room
from paceline.terminal import session
from paceline.terminal.chat import Conversation, piped_messages
from tests.toy import ToyTokenizer, toy_engine

LONGER = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_chat_answers_each_line_of_a_pipe_and_remembers(paceline, toy, tmp_path):
    saved = tmp_path / "saved.json"
    lines = f"first\n\nsecond\n/save {saved}\n/exit\nthird\n".encode()
    code, out, err = paceline("chat", "--max-tokens", 4, "--ignore-eos", "--system", "S", stdin=lines)
    assert code == 0
    messages = json.loads(saved.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages[1::2]] == ["first", "second"]
    assert out == "".join(message["content"] + "\n" for message in messages[2::2])
    assert "stopped after 4 tokens" in err


def test_each_answer_is_what_llm_chat_gives_for_the_whole_conversation(toy, capsys):
    conversation = Conversation(toy, GREEDY, system="S")
    conversation.run(iter(["one", "two"]))
    messages = [{"role": "system", "content": "S"}, *conversation.messages]
    for turn in (2, 4):
        (expected,) = toy.chat(messages[:turn], GREEDY)
        assert messages[turn]["content"] == expected.outputs[0].text


def test_commands_change_the_conversation(toy, capsys, tmp_path):
    conversation = Conversation(toy, GREEDY)
    conversation.run(iter(["one", "two", "/undo"]))
    assert [message["content"] for message in conversation.messages[::2]] == ["one"]
    conversation.run(iter(["/system be brief"]))
    assert conversation.system == "be brief"
    conversation.run(iter(["/reset", "/undo", "/frobnicate", "/save", f"/save {tmp_path}/no/such", "/help"]))
    assert conversation.messages == []
    assert conversation.system == "be brief"
    errors = capsys.readouterr().err
    for words in ("nothing to take back", "no command /frobnicate", "/save FILE", "cannot be written"):
        assert words in errors
    conversation.run(iter(["/system", " /usr is a message"]))
    assert conversation.system is None
    assert conversation.messages[0]["content"] == "/usr is a message"


def test_a_message_beyond_the_context_is_dropped_and_the_chat_continues(toy, capsys):
    conversation = Conversation(toy, GREEDY)
    conversation.run(iter(["one", "x" * 400, "two"]))
    assert "the context holds 400, so this message was not sent" in capsys.readouterr().err
    assert [message["content"] for message in conversation.messages[::2]] == ["one", "two"]


def test_an_answer_that_fills_the_context_says_so(toy, capsys):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    Conversation(toy, params).run(iter(["one"]))
    assert "the context of 400 tokens is full" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(monkeypatch, toy, capsys):
    shown = []
    before = signal.getsignal(signal.SIGINT)  # a shell in the background ignores it

    def show(text):
        shown.append(text)
        if len(shown) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_room, "show", show)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    conversation = Conversation(toy, params)
    conversation.run(iter(["one", "/undo", "two"]))
    assert "[stopped]" in capsys.readouterr().err
    assert conversation.messages[0]["content"] == "two"
    assert not toy.engine.has_unfinished
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_leaves(monkeypatch, toy):
    def show(text):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_room, "show", show)
    with pytest.raises(KeyboardInterrupt):
        Conversation(toy, GREEDY).run(iter(["one"]))
    assert not toy.engine.has_unfinished


def test_a_failed_answer_is_reported_and_its_message_dropped(toy, capsys):
    conversation = Conversation(toy, GREEDY)
    toy.engine.backend.fail_next = BackendError("the backend broke. Mend it.")
    conversation.run(iter(["one", "two"]))
    assert "error: the backend broke. Mend it." in capsys.readouterr().err
    assert conversation.messages[0]["content"] == "two"


def test_typed_lines_are_joined_and_ctrl_c_drops_one(monkeypatch, capsys):
    typed = iter(["one \\", "two", KeyboardInterrupt, "three", EOFError])

    def answer(prompt):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer)
    assert list(chat_room.typed_messages()) == ["one \n" + "two", "three"]


def test_piped_lines_may_be_invalid_utf8(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\r\nb")))
    assert list(piped_messages()) == ["a\ufffd", "b"]


def test_control_characters_of_an_answer_do_not_reach_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    session.show("a\x1b[31m\tb\n")
    assert capsys.readouterr().out == "a\ufffd[31m\tb\n"


def test_stats_tell_speed_acceptance_and_drafter(capsys):
    engine = toy_engine(
        max_model_len=400,
        drafter=NgramDrafter(NgramDrafter.Options()),
        controller=FixedController(DraftPlan("ngram", 3)),
    )
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    conversation = Conversation(LLM.from_engine(engine, ToyTokenizer()), params)
    conversation.run(iter(["/stats"]))
    assert "there is no answer yet" in capsys.readouterr().err
    conversation.run(iter(["ababababab", "cdcdcdcd", "/stats"]))
    lines = capsys.readouterr().err.splitlines()
    last, every = lines.index("last answer:"), lines.index("all 2:")
    assert "60 tokens, " in lines[last + 1]
    assert "120 tokens, " in lines[every + 1]
    assert "tokens/s, first token after " in lines[every + 1]
    assert lines[every + 2].startswith("ngram: ")
    assert "drafted tokens accepted" in lines[every + 2]


def test_an_answer_on_a_terminal_breaks_between_words(monkeypatch, toy, capsys):
    (expected,) = toy.chat([{"role": "user", "content": "one"}], LONGER)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    Conversation(toy, LONGER).run(iter(["one"]))
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert "".join(lines).replace(" ", "") == expected.outputs[0].text.replace("\n", "").replace(" ", "")
    assert all(len(line) <= 20 or " " not in line.strip() for line in lines)
