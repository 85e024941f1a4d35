"""The page docs/extend/drafter.md, followed word by word."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.draft import methods
from paceline.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "drafter.md"


@pytest.fixture
def bigram(monkeypatch):
    """The page's drafter as a module, and its row in the table."""
    source, row = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = types.ModuleType("paceline.draft.bigram")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, str(PAGE), "exec"), module.__dict__)
    (entry,) = re.findall(r'"bigram": (Method\(.*\)),', row)
    monkeypatch.setitem(methods.METHODS, "bigram", eval(entry, {"Method": methods.Method}))
    return module


@pytest.mark.real
def test_the_page_makes_a_working_drafter(bigram):
    llm = LLM("smollm2-135m", speculative_config={"method": "bigram", "most_tokens": 500})
    prompts = ["one two one two one two one two", "Once upon a time"]

    def run(speculative):
        params = SamplingParams(temperature=0, max_tokens=40, logprobs=1, speculative=speculative)
        return llm.generate(prompts, params)

    plain, drafted = run("off"), run("bigram")
    assert [output.outputs for output in drafted] == [output.outputs for output in plain]
    assert sum(output.metrics.speculative.num_accepted_draft_tokens for output in drafted) > 10


def test_its_options_are_checked_like_those_of_any_other(bigram):
    with pytest.raises(ConfigError, match="did you mean 'most_tokens'"):
        methods.parse_speculative_config({"method": "bigram", "most_token": 3})
    with pytest.raises(ConfigError, match="most_tokens must be"):
        methods.parse_speculative_config({"method": "bigram", "most_tokens": 0})
