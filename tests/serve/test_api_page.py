"""docs/guides/api.md names every path and every field that the API takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.serve.anthropic.messages_protocol import MessagesRequest
from paceline.serve.openai.chat_protocol import ChatRequest
from paceline.serve.openai.completions import CompletionRequest
from paceline.serve.openai.fields import Body, StructuredOutputs
from paceline.serve.openai.protocol import Speculative, StreamOptions
from paceline.serve.openai.tokens import DetokenizeRequest, TokenizeRequest
from tests.serve.api import Api

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "api.md").read_text()
PROSE = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)
WORDS = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", PROSE))))


@pytest.mark.parametrize(
    "model",
    [
        ChatRequest,
        CompletionRequest,
        MessagesRequest,
        TokenizeRequest,
        DetokenizeRequest,
        StreamOptions,
        Speculative,
        StructuredOutputs,
    ],
)
def test_every_field_is_on_the_page(model: type[Body]) -> None:
    names = {field.alias or name for name, field in model.model_fields.items()} - {"whitespace_pattern"}
    assert names - WORDS == set()


def test_every_path_is_on_the_page_and_in_a_group(paths: Mapping[str, Any]) -> None:
    assert [path for path in paths if path.split("{")[0] not in PAGE] == []
    tags = [operation["tags"] for path in paths.values() for operation in path.values()]
    assert {tag for (tag,) in tags} == {"Anthropic", "OpenAI", "Server", "Tokens"}


def test_a_second_name_of_a_path_names_the_first(paths: Mapping[str, Any]) -> None:
    assert "/health" in paths["/ping"]["get"]["description"]
    assert "/ping" not in paths["/health"]["get"]["description"]


@pytest.fixture(scope="module")
def paths() -> Mapping[str, Any]:
    """The paths of /openapi.json."""
    api = Api()
    found: Mapping[str, Any] = api.get("/openapi.json")["paths"]
    api.close()
    return found
