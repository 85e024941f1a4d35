"""/tokenize, /detokenize, /v1/models and /version."""

from __future__ import annotations

from typing import Any

import openai.types
import pytest

from paceline import __version__
from paceline.serve.openai.models import ModelList
from paceline.serve.openai.tokens import Tokens
from tests.serve.api import Api
from tests.toy import ToyTokenizer


def test_a_prompt_is_tokenized_as_it_is_for_a_completion(api: Api) -> None:
    answer = api.post("/tokenize", {"prompt": "hello"})
    assert answer == {"count": 6, "max_model_len": 400, "tokens": ToyTokenizer().encode("hello")}
    bare = api.post("/tokenize", {"prompt": "hello", "add_special_tokens": False, "return_token_strs": True})
    assert bare["tokens"] == answer["tokens"][1:]
    assert bare["token_strs"] == ["J", "G", "N", "N", "Q"]
    Tokens.model_validate(bare, extra="forbid")
    assert api.post("/tokenize", {"prompt": ""})["count"] == 1


def test_messages_are_tokenized_as_they_are_for_a_chat(api: Api) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for extra in ({}, {"tools": [tool]}):
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], **extra}
        answer = api.post("/tokenize", body)
        chat = {**body, "max_tokens": 1, "tool_choice": "auto" if extra else None}
        asked = api.request("POST", "/v1/chat/completions", json=chat)
        if asked.status_code == 200:
            assert answer["count"] == asked.json()["usage"]["prompt_tokens"]
        else:  # the toy's context is small for a prompt with tools
            assert f"{answer['count']} tokens" in asked.json()["error"]["message"]


def test_detokenize_turns_ids_back_into_the_text(api: Api) -> None:
    assert api.post("/detokenize", {"tokens": [1, 40, 41, 0]}) == {"prompt": "<bos>HI<eos>"}
    assert api.post("/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_token": True}, "add_special_token"),
        ("/detokenize", {"tokens": [97]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": ["1"]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_an_error_names_the_field(api: Api, path: str, body: Any, param: str) -> None:
    assert api.refusal(path, body)["param"] == param


def test_models_lists_all_names_of_the_served_model(api: Api) -> None:
    listed = api.get("/v1/models")
    ModelList.model_validate(listed, extra="forbid")
    assert [openai.types.Model.model_validate(model).id for model in listed["data"]] == ["toy", "toy-too"]
    assert {model["max_model_len"] for model in listed["data"]} == {400}
    assert api.get("/v1/models/toy-too") == listed["data"][1]
    missing = api.request("GET", "/v1/models/some/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_version(api: Api) -> None:
    assert api.get("/version") == {"version": __version__}
