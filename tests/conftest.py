"""Fixtures of the command line tests: the toy model in place of a real one, and commands run in process."""

from __future__ import annotations

import gc
import io
import sys

import pytest

from paceline import LLM
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.terminal import chat as chat_room
from paceline.terminal import generate as generate_room
from tests.toy import ToyTokenizer, toy_engine


def pytest_configure() -> None:
    gc.disable()  # until all tests are imported: there is much, and all of it stays


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def toy(monkeypatch):
    """The toy model in place of a real one; `toy.asked` has the engine options of the last load."""
    llm = LLM.from_engine(toy_engine(max_model_len=400), ToyTokenizer())

    def load(model, options):
        EngineConfig.from_options(model=model, **options)
        llm.asked = {"model": model, **options}
        return llm

    monkeypatch.setattr(generate_room, "load", load)
    monkeypatch.setattr(chat_room, "load", load)
    return llm


@pytest.fixture
def paceline(monkeypatch, capsys):
    """Run a command line; gives (exit code, standard output, standard error)."""

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end:
            main()
        written = capsys.readouterr()
        return end.value.code or 0, written.out, written.err

    return run
