"""GrammarTrial: a grammar that hangs or kills the library is refused, and its process is killed."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.constrain import GrammarCompiler, GrammarLimits, StructuredOutputsParams, trial
from paceline.errors import RequestError
from tests.constrain.walks import GRAMMARS, TOKENIZER
from tests.large import repeated

# the library's fuel does not end these: they take minutes and gigabytes
ENDLESS = {
    "patterns that must all match": {
        "json": {
            "type": "string",
            "allOf": [{"pattern": f"(a|b)*{'ab'[i % 2]}(a|b){{{i}}}$"} for i in range(200)],
        }
    },
    "intersection of terminals": {
        "grammar": "start: A\nA: " + " & ".join(f"/(a|b)*{'ab'[i % 2]}(a|b){{{i + 3}}}/" for i in range(40))
    },
}


def ambiguous(rules: int, before: str = "") -> str:
    """A grammar of which each token costs time that grows with the third power of the rules."""
    names = "|".join(f"b{i}" for i in range(rules))
    heads = [f'b{i}: a "x"? | "x"? a a | "x"' for i in range(rules)]
    return "\n".join([f"start: {before} a*", f"a: {names}", *heads])


@pytest.fixture
def children(monkeypatch: Any) -> list[subprocess.Popen[str]]:
    """The processes that grammars were tried in."""
    started: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def recorded(*args: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(trial.subprocess, "Popen", recorded)
    return started


@pytest.fixture
def compiler(children: list[subprocess.Popen[str]]) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, GrammarLimits(seconds=1.0))
    yield made
    made.close()
    assert all(child.poll() is not None for child in children)


@pytest.mark.parametrize("name", ["patterns that must all match", *repeated("intersection of terminals")])
def test_a_grammar_that_takes_too_long_is_refused_and_its_process_killed(
    compiler: GrammarCompiler, children: list[subprocess.Popen[str]], name: str
) -> None:
    with pytest.raises(RequestError, match=r"cannot be compiled: it takes longer than 1 s"):
        compiler.compile(StructuredOutputsParams(**ENDLESS[name]), trusted=False)
    assert [child.poll() is not None for child in children] == [True]
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-grammar"]
    compiler.compile(StructuredOutputsParams(regex="[a-c]{3}"), trusted=False)  # in a new process


@pytest.mark.parametrize("before", ['"yes"', '"yes"' * 100])
def test_a_costly_token_is_found_behind_cheap_ones(compiler: GrammarCompiler, before: str) -> None:
    """It would be computed in the engine's thread, and all requests wait for it."""
    source = ambiguous(300, before)  # fifteen times the work of 120, of which a fast machine notices nothing
    with pytest.raises(RequestError, match="takes longer than"):
        compiler.compile(StructuredOutputsParams(grammar=source), trusted=False)


def test_a_grammar_that_its_process_does_not_survive_is_refused(
    compiler: GrammarCompiler, children: list[subprocess.Popen[str]], monkeypatch: Any
) -> None:
    compiler.compile(StructuredOutputsParams(regex="a"), trusted=False)
    children[0].kill()
    with pytest.raises(RequestError, match="too much memory, or is too deep"):
        compiler.compile(StructuredOutputsParams(regex="b"), trusted=False)


def test_grammars_are_the_same_tried_or_not(
    compiler: GrammarCompiler, children: list[subprocess.Popen[str]]
) -> None:
    for params in GRAMMARS.values():
        tried = compiler.compile(params, trusted=False)
        assert tried is compiler.compile(params)
    assert len(children) == 1
    with pytest.raises(RequestError, match="unknown name"):  # as it is told without a trial
        compiler.compile(StructuredOutputsParams(grammar="start: nothing"), trusted=False)
