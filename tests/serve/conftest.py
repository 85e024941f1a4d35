"""One real server with the real small model, for all tests that ask for it."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import openai
import pytest

from benchmarks.server.process import ServerProcess
from paceline import LLM

MODEL = "smollm2-135m"
KEY = "sk-test-1"
DRAFTS = '[{"method": "suffix"}, {"method": "ngram"}]'
ROOM = 32  # outputs that run or wait; more are turned away
THREADS = 1  # tests run beside each other: a second would mostly wait for a core


@pytest.fixture(scope="session")
def real_server() -> Iterator[ServerProcess]:
    """`paceline serve smollm2-135m` in a process of its own. It drafts, and has little room to wait."""
    options = ("--speculative-config", DRAFTS, "--max-num-seqs", "16", "--max-queue", str(ROOM - 16))
    process = ServerProcess(MODEL, "--threads", str(THREADS), *options, api_key=KEY)
    yield process
    assert process.stop() == 0  # SIGTERM drains and ends well


@pytest.fixture
def client(real_server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The official client, as a user makes it. It does not try again by itself."""
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def offline() -> LLM:
    """The same model, offline and without drafts: the truth."""
    return LLM(MODEL, speculative_config="off", threads=THREADS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the server's log beside a test that failed with it."""
    report = yield
    server = getattr(item, "funcargs", {}).get("real_server")
    if report.failed and isinstance(server, ServerProcess):
        report.sections.append(("log of the server, its end", server.log[-6000:]))
    return report
