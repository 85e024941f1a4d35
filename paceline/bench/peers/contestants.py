"""Engines that are compared, each in its own process.

Threads of one engine spin for a while after its work is done, and would slow another in the same process
or right after it. So every contestant is loaded once in its own process, gets requests in turn, and is
idle while another works.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.peers import worker
from paceline.errors import ConfigError, PacelineError

# GCC considers the stores of llama.cpp's AMX tile shapes dead, and removes them.
KEEP_STORES = "-DCMAKE_C_FLAGS='-fno-tree-dse -fno-dse' -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"
LLAMA_REMEDIES = {
    "ModuleNotFoundError": (
        "Run `pip install 'paceline[bench]'`, or name an interpreter that has llama_cpp by --peer-python. "
        "Or leave it out: --peer none."
    ),
    "SIGILL": (
        "So end llama.cpp's AMX kernels on Sapphire and Emerald Rapids when GCC built them. "
        f'Build it like this: CMAKE_ARGS="{KEEP_STORES}" pip install --force-reinstall --no-cache-dir '
        "--no-binary llama-cpp-python llama-cpp-python"
    ),
}


class ContestantError(PacelineError):
    """A contestant could not start, or did not answer."""


@dataclass(frozen=True)
class Generation:
    """One contestant's answer to one prompt. Times are in seconds."""

    first_seconds: float  # until the first token: prefill
    rest_seconds: float  # from the first token to the last
    token_ids: list[int]
    peak_memory_bytes: int  # of the contestant's process so far
    overhead_seconds: list[float] = field(default_factory=list)  # [tokens - 1] of each step, outside its pass
    drafts: int = 0  # passes with drafts, if the contestant counts them
    accepted: list[int] = field(default_factory=list)  # [d] of these, accepted at depth d + 1


class Contestant:
    """An engine with a loaded model in its own process, idle until it gets a request."""

    def __init__(self, name: str, command: Sequence[str], remedies: Mapping[str, str] | None = None) -> None:
        """Start it and wait until its model is loaded. `remedies`: hints by signal or exception name."""
        self.name = name
        self._remedies = remedies or {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.facts = self._answer()  # version and other facts about itself

    def generate(self, prompt: Sequence[int], tokens: int, **options: Any) -> Generation:
        """Generate `tokens` tokens greedily; options of the worker are stop_ids and lookup."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died; the reason is found below
            question = {"prompt": list(prompt), "tokens": tokens, **options}
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return Generation(**self._answer())

    def close(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # unread requests do not matter now
                stream.close()
        self._log.close()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            error = self._death_error()
        else:
            answer: dict[str, Any] = json.loads(line)
            if "error" not in answer:
                return answer
            remedy = self._remedies.get(answer["kind"], "")
            failure = f"{self.name} failed ({answer['kind']}): {answer['error'].rstrip('.')}"
            error = ContestantError(f"{failure}. {remedy}".rstrip())
        self.close()
        raise error

    def _death_error(self) -> ContestantError:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        remedy = self._remedies.get(how, "")
        self._log.seek(0)
        last_lines = self._log.read().decode(errors="replace").strip()[-500:]
        log_end = "" if remedy or not last_lines else f"Its last words: {last_lines}"
        return ContestantError(f"{self.name} died ({how}). {remedy or log_end}".rstrip())


def start_paceline(path: Path, threads: int, quantization: str) -> Contestant:
    """Our engine."""
    options = {"model": str(path), "threads": threads, "quantization": quantization}
    command = [sys.executable, "-m", worker.__name__, "paceline", json.dumps(options)]
    return Contestant("paceline", command)


def start_llama_cpp(path: Path, threads: int, context: int, python: str) -> Contestant:
    """llama.cpp with the same file, in an interpreter that has llama_cpp."""
    if shutil.which(python) is None:
        raise ConfigError(
            f"--peer-python {python} cannot be run; give the path of a Python interpreter that has llama_cpp."
        )
    if path.suffix != ".gguf":
        raise ContestantError(
            f"llama.cpp reads only .gguf files, and {path.name} is none. Give one, or use --peer none."
        )
    options = {"model": str(path), "threads": threads, "context": context}
    command = [python, str(Path(worker.__file__).resolve()), "llama.cpp", json.dumps(options)]
    return Contestant("llama.cpp", command, LLAMA_REMEDIES)
