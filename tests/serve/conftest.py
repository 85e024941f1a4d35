"""Fixtures: the API in this process around a toy model, and one real server with the default model."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping
from typing import ClassVar

import openai
import pytest

from benchmarks.server.process import ServerProcess
from paceline import LLM
from paceline.constrain import compiler
from paceline.constrain.trial import GrammarTrial
from tests.serve.api import Api

MODEL = "smollm2-135m"
KEY = "sk-test-1"
DRAFTS = '[{"method": "suffix"}, {"method": "ngram"}]'
ROOM = 32  # running and waiting outputs; more get 429
THREADS = 1  # tests run in parallel: a second thread would mostly wait for a core


class SharedTrial(GrammarTrial):
    """Asks the child process of all engines with the same limit of time, which they leave running."""

    _by_seconds: ClassVar[dict[float, GrammarTrial]] = {}
    _turn = threading.Lock()

    def fault_of(self, source: str, limits: Mapping[str, int]) -> str | None:
        with self._turn:
            shared = self._by_seconds.setdefault(self._seconds, GrammarTrial(self._seconds))
            return shared.fault_of(source, limits)

    @classmethod
    def close_all(cls) -> None:
        for shared in cls._by_seconds.values():
            shared.close()
        cls._by_seconds.clear()


@pytest.fixture(scope="package", autouse=True)
def grammars_are_tried_in_one_process() -> Iterator[None]:
    """Each engine would start its own: tests/constrain/test_trial.py and whole servers do."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(compiler, "GrammarTrial", SharedTrial)
        yield
    SharedTrial.close_all()


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    """The API around a toy model, called without sockets."""
    made = Api()
    yield made
    made.close()


@pytest.fixture(scope="session")
def real_server() -> Iterator[ServerProcess]:
    """`paceline serve smollm2-135m` in its own process, with drafters and a short queue."""
    options = ("--speculative-config", DRAFTS, "--max-num-seqs", "16", "--max-queue", str(ROOM - 16))
    process = ServerProcess(MODEL, "--threads", str(THREADS), *options, api_key=KEY)
    yield process
    assert process.stop() == 0  # SIGTERM drains


@pytest.fixture
def client(real_server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The official client, as a user creates it, without retries."""
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def offline() -> LLM:
    """The same model, offline and without drafting: the reference."""
    return LLM(MODEL, speculative_config="off", threads=THREADS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the server's log to the report of a failed test."""
    report = yield
    server = getattr(item, "funcargs", {}).get("real_server")
    if report.failed and isinstance(server, ServerProcess):
        report.sections.append(("log of the server, its end", server.log[-6000:]))
    return report
