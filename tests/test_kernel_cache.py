"""Compiled functions on disk: a cache that is damaged, full or read-only costs time, but never a run."""

from __future__ import annotations

import errno
import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline import home, kernel_cache
from paceline.errors import ConfigError
from paceline.kernel_cache import cached_kernels, jitted


def doubled(number: Any) -> Any:
    return 2 * number


def run(folder: Path, number: Any = 3) -> int:
    """How many kernels a new process would find in this folder."""
    function = jitted(doubled, folder)
    assert function(number) == 2 * number
    return sum(function.stats.cache_hits.values())


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The warnings of a process that has not warned yet."""
    monkeypatch.setattr(home, "_unwritable", set())
    caplog.set_level(logging.WARNING)
    return caplog


def test_compiled_kernels_are_found_again(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    assert run(tmp_path) == 0
    assert run(tmp_path) == 1
    assert warnings.messages == []


def test_processes_can_compile_concurrently(tmp_path: Path) -> None:
    first, second = (
        jitted(doubled, tmp_path),
        jitted(doubled, tmp_path),
    )  # both start without anything on disk
    first(3)
    second(2.5)
    assert len(cached_kernels(tmp_path)) == 2
    assert (run(tmp_path, 3), run(tmp_path, 2.5)) == (1, 1)


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "other"])
def test_a_damaged_file_is_compiled_again_and_replaced(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, damage: str
) -> None:
    run(tmp_path)
    (file,) = cached_kernels(tmp_path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = {"empty": b"", "cut": content[:1000], "changed": content, "other": b"\x80" * 5000}
    file.write_bytes(damaged[damage])
    assert run(tmp_path) == 0
    (message,) = warnings.messages
    assert file.name in message
    assert run(tmp_path) == 1


def test_a_file_of_an_older_source_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(kernel_cache, "source_digest", lambda _: "older")
        run(tmp_path)
    assert run(tmp_path) == 0
    assert run(tmp_path) == 1
    assert len(cached_kernels(tmp_path)) == 1


CALLER = """
from paceline.kernel_cache import jitted
from {name}_called import called

def caller(number):
    return called(number) + 1

def compiled(folder):
    return jitted(caller, folder)
"""
CALLED = """
import numba

@numba.njit
def called(number):
    return {factor} * number
"""


def checkout(folder: Path, monkeypatch: pytest.MonkeyPatch, factor: int) -> ModuleType:
    """A function and what it calls, in two files of a folder, as a new process would import them."""
    name = "twofiles"
    folder.mkdir()
    (folder / f"{name}_caller.py").write_text(CALLER.format(name=name))
    (folder / f"{name}_called.py").write_text(CALLED.format(factor=factor))
    monkeypatch.syspath_prepend(str(folder))
    for module in (f"{name}_caller", f"{name}_called"):
        sys.modules.pop(module, None)
    return importlib.import_module(f"{name}_caller")


def test_a_second_checkout_compiles_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = []
    for place in ("first", "second"):
        function = checkout(tmp_path / place, monkeypatch, factor=2).compiled(tmp_path / "kernels")
        assert function(3) == 7
        hits.append(sum(function.stats.cache_hits.values()))
    assert hits == [0, 1]


def test_a_change_in_a_called_function_of_another_file_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [
        checkout(tmp_path / f"times{factor}", monkeypatch, factor).compiled(tmp_path / "kernels")(3)
        for factor in (2, 5)
    ]
    assert answers == [7, 16]


def test_a_file_in_place_of_the_folder_is_no_error(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").write_text("in the way")
    assert run(tmp_path / "kernels") == 0
    assert run(tmp_path / "kernels", 2.5) == 0
    (message,) = warnings.messages  # once, although two kernels were read and written
    assert "Not a directory" in message
    assert "Set PACELINE_HOME" in message
    assert str(tmp_path) in message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_an_unwritable_folder_is_no_error(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(path: Path, content: bytes) -> int:
        path.touch()  # a full disk leaves an empty file
        raise OSError(number, errno.errorcode[number])

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", fail)
        assert run(tmp_path) == 0
    (message,) = warnings.messages
    assert errno.errorcode[number] in message
    assert "Set PACELINE_HOME" in message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert run(tmp_path) == 0  # nothing half written is taken for a kernel


def test_without_a_home_folder_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", "~no-such-user/cache")
    with pytest.raises(ConfigError, match="Set PACELINE_HOME to a folder"):
        home.paceline_home()
