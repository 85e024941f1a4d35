"""docs/api.md names every path and every field that the API takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.serve.chat_protocol import ChatRequest
from paceline.serve.completions import CompletionRequest
from paceline.serve.fields import Body
from paceline.serve.protocol import Speculative, StreamOptions, StructuredOutputs
from paceline.serve.tokens import DetokenizeRequest, TokenizeRequest
from tests.serve.api import Api

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
PROSE = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)
WORDS = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", PROSE))))


@pytest.mark.parametrize(
    "model",
    [
        ChatRequest,
        CompletionRequest,
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


def test_every_path_is_on_the_page() -> None:
    api = Api()
    paths = api.get("/openapi.json")["paths"]
    api.close()
    assert [path for path in paths if path.split("{")[0] not in PAGE] == []
