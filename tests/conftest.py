"""What property tests try, and fixtures of the command line tests: the toy model, commands run in process."""

from __future__ import annotations

import gc
import io
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.internal.conjecture import providers

from paceline import LLM, build
from paceline.backends import load as loading
from paceline.backends.base import Backend
from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.draft.lookup import occurrences
from paceline.engine import engine as engine_room
from paceline.learn.activity import Activity, new_activity
from paceline.models import registry
from paceline.models.checkpoint import Checkpoint
from paceline.models.gguf.reader import GgufFile, read_gguf
from paceline.models.gguf.tokenizer import gguf_tokenizer
from paceline.models.lora import Adapter
from paceline.models.registry import ALIASES, DEFAULT_MODEL, model_path
from paceline.models.tokenizer import Tokenizer
from paceline.terminal import chat as chat_room
from paceline.terminal import generate as generate_room
from tests.planted import Plant
from tests.toy import ToyTokenizer, toy_engine

# `make test` tries the same examples everywhere and always: what passed for us passes for a newcomer.
# `make fuzz` (tests/fuzz.py) tries others each time. How fast a machine is makes no test fail.
settings.register_profile(
    "fixed",
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    max_examples=500,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    deadline=20_000,  # milliseconds: whatever is made up, no example takes so long
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("fixed")

MANY_MODULES = 200
SHOWN_FILES = 40


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are imported: there is much, and all of it stays
    if config.getoption("--hypothesis-profile", None) != "fuzz":
        # hypothesis also tries constants of the modules that are imported by then, which depends on the
        # tests that ran before in the same process
        assert callable(providers._get_local_constants)
        providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of tests/scheduling.py for `--dist loadfile`, as `make test` has it."""
    if config.getvalue("dist") != "loadfile" or config.getoption("--hypothesis-profile", None) == "fuzz":
        return None  # `make fuzz` has another order each round
    from tests.scheduling import Scheduling

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Beside the slowest tests, the slowest files: most of the time is in tests that are short, and many."""
    if not config.getoption("durations"):
        return
    seconds = Counter[str]()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"slowest files of {sum(seconds.values()):.0f} s")
    for file, spent in seconds.most_common(SHOWN_FILES):
        terminalreporter.write_line(f"{spent:6.1f} s {file}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def activity() -> Iterator[Activity]:
    """The shared memory of a server and its trainer."""
    with new_activity() as made:
        yield made


@pytest.fixture(scope="session", autouse=True)
def imported_modules_stay_frozen() -> Iterator[None]:
    """Engines unfreeze what others froze: each would search all modules for garbage, for half a second.

    They search only what is new: modules are imported by tests too, torch's compiler among them.
    """
    collecting = SimpleNamespace(collect=lambda: gc.collect(1), freeze=lambda: None, unfreeze=lambda: None)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(engine_room, "gc", collecting)
        yield


@pytest.fixture(scope="module", autouse=True)
def modules_that_tests_import_are_frozen_too() -> Iterator[None]:
    """Every collection would search all of transformers and of torch's compiler once tests have used them."""
    before = len(sys.modules)
    yield
    if len(sys.modules) - before > MANY_MODULES:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def real_weights_are_packed_once() -> Iterator[None]:
    """Engines in this process share the backends of the real model, as target and as draft model.

    Engines of one model may: they take turns. Models that tests write are tiny, and each is loaded.
    """
    real_model, loaded = model_path(ALIASES[DEFAULT_MODEL]), dict[Any, Backend]()

    def load_once(
        checkpoint: Checkpoint,
        options: BackendOptions,
        max_rows: int,
        beside: Backend | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> Backend:
        if checkpoint.source != real_model or options.name != "cpu" or adapters:
            return load_backend(checkpoint, options, max_rows, beside, adapters)
        key = checkpoint.source, options, max_rows, beside
        if key not in loaded:
            loaded[key] = load_backend(checkpoint, options, max_rows, beside)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(build, "load_backend", load_once)
        patches.setattr(loading, "load_backend", load_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def the_real_file_is_read_once() -> Iterator[None]:
    """Engines in this process share what was read of the real model's file: names, vocabulary, merges."""
    real_model = model_path(ALIASES[DEFAULT_MODEL])

    @cache
    def read() -> tuple[GgufFile, Tokenizer]:
        file = read_gguf(real_model)
        return file, gguf_tokenizer(file)

    def read_once(path: Path) -> GgufFile:
        return read()[0] if path == real_model else read_gguf(path)

    def tokenizer_once(file: GgufFile) -> Tokenizer:
        return read()[1] if file.path == real_model else gguf_tokenizer(file)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(registry, "read_gguf", read_once)
        patches.setattr(registry, "gguf_tokenizer", tokenizer_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def stores_of_answers_take_memory_as_they_grow() -> Iterator[None]:
    """Each drafter with one would touch a quarter of a gigabyte, so that no step waits for page faults."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(occurrences, "touch_pages", lambda table: None)
        yield


@pytest.fixture
def plant(monkeypatch):
    """Plants bugs; each must have been met by the end of the test."""
    plant = Plant(monkeypatch)
    yield plant
    plant.assert_ran()


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
def process_stays_as_it_is():
    """What a server changes in its process ends with the test: its log writes to a captured stream, which is
    closed then.
    """
    root, interval = logging.getLogger(), sys.getswitchinterval()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.setswitchinterval(interval)


@pytest.fixture
def paceline(monkeypatch, capsys, process_stays_as_it_is):
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
