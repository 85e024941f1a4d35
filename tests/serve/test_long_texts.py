"""Long texts: tokenizing ends once a text cannot fit, and does not stop other threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from paceline.models.tokenizer import TooManyTokens
from paceline.serve.openai import tokens
from tests.serve.api import Api
from tests.serve.echo import byte_tokenizer


def test_a_text_that_cannot_fit_is_not_tokenized_to_its_end() -> None:
    with pytest.raises(TooManyTokens) as refused:
        byte_tokenizer().encode("😀" * 9_000, most=1000)
    assert not refused.value.exact
    assert 1000 < refused.value.count < 9_000  # of 36,000
    assert "more than" in str(refused.value)


def test_a_text_with_too_many_characters_for_the_context_is_not_tokenized(monkeypatch: Any) -> None:
    """Each token of this vocabulary is at most as long as <|answer|>."""
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "_encoding", None)
    with pytest.raises(TooManyTokens):
        tokenizer.encode("a" * 10_001, most=1000)


@pytest.mark.parametrize("text", ["a", "é ", "😀", " ", "<|end|>", "word and word\n"])
def test_a_token_limit_does_not_change_tokens(text: str) -> None:
    tokenizer = byte_tokenizer()
    long = text * 3000
    ids = tokenizer.encode(long)
    for most in (len(ids), 2 * len(ids), 10**9):
        assert tokenizer.encode(long, most=most) == ids
    with pytest.raises(TooManyTokens):
        tokenizer.encode(long, most=len(ids) - 1)


def test_the_error_for_a_long_prompt_has_its_length(api: Api) -> None:
    for prompt in ("a" * 1000, [5] * 1001):
        error = api.refusal("/v1/completions", {"prompt": prompt})
        assert error["param"] == "prompt"
        assert "1001 tokens and the context holds 400" in error["message"]
        assert "by 602 tokens" in error["message"]


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_tokenized_or_decoded(work: str) -> None:
    """The GIL is released meanwhile: another thread runs again and again."""
    tokenizer = byte_tokenizer()
    text = "word and word " * 20_000
    given: Any = text if work == "encode" else tokenizer.encode(text)
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        getattr(tokenizer, work)(given)
        ended.set()

    thread = threading.Thread(target=run)
    turns = 0
    thread.start()
    begun.wait()
    while not ended.is_set():
        time.sleep(0.0005)
        turns += 1
    thread.join()
    assert turns > 10


def test_tokenize_has_a_token_limit(api: Api, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENIZED", 10_000)
    answer = api.post("/tokenize", {"prompt": "ab" * 4900, "return_token_strs": True})  # in several pieces
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 9801
    assert answer["tokens"][1:] == answer["tokens"][1:3] * 4900
    error = api.refusal("/tokenize", {"prompt": "a" * 10_000})
    assert error["param"] == "prompt"
    assert "at most 10000" in error["message"]
