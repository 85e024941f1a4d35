"""The table of what runs where, in docs/guides/models.md."""

from __future__ import annotations

import pytest

from paceline.models.families.table import FAMILIES
from tests.large import REPEATS
from tests.models.drafter_support import drafter_table
from tests.models.support import (
    BEGIN_DRAFTERS,
    BEGIN_FILES,
    GUIDE,
    NOT_TRIED,
    checkpoints,
    gguf_cell,
    quantized_table,
    table,
    written_table,
)


def test_every_family_has_its_line() -> None:
    lines = written_table(GUIDE.read_text())[2:]
    assert [line.split("`")[1] for line in lines] == list(FAMILIES)
    assert not any("**" in line for line in lines)
    assert not any(NOT_TRIED in line for line in lines)


def test_every_family_has_its_line_of_drafters() -> None:
    lines = written_table(GUIDE.read_text(), BEGIN_DRAFTERS)[2:]
    assert [line.split("`")[1] for line in lines] == list(FAMILIES)
    assert not any("**" in line for line in lines)


def test_the_table_of_quantized_files_is_true() -> None:
    """`python -m tests.models.support` writes it again."""
    assert written_table(GUIDE.read_text(), BEGIN_FILES) == quantized_table()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "deepseek_v3", "qwen3_5_text"])
def test_gguf_files_answer_as_the_model_that_they_were_written_from(family: str) -> None:
    assert gguf_cell(family) == "yes"


@REPEATS
def test_the_table_is_true() -> None:
    """`python -m tests.models.support` writes it again."""
    assert written_table(GUIDE.read_text()) == table()
    drafters = drafter_table({family: checkpoints(family) for family in FAMILIES})
    assert written_table(GUIDE.read_text(), BEGIN_DRAFTERS) == drafters
