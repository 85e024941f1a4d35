"""Stands in for llama_cpp. FAKE_LLAMA says how it misbehaves, FAKE_LLAMA_LOG where it writes what it did."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

MODE = os.environ.get("FAKE_LLAMA", "sound")
if MODE == "missing":
    raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")

__version__ = "0.0.fake"


def llama_print_system_info() -> bytes:
    return b"CPU : AVX2 = 1 | AMX_INT8 = 1 | "


def log(event: str, **facts: Any) -> None:
    with open(os.environ["FAKE_LLAMA_LOG"], "a") as file:
        file.write(json.dumps({"event": event, **facts}) + "\n")


class Llama:
    def __init__(self, model_path: str, **options: Any) -> None:
        print("libraries print where they should not")
        log("load", model=model_path, **options)
        if MODE == "illegal":
            os.kill(os.getpid(), signal.SIGILL)
        if MODE == "aborts":
            os.write(2, b"ggml: cannot go on\n")
            os._exit(3)
        self._turns = 0

    def reset(self) -> None:
        log("reset")

    def generate(self, tokens: list[int], temp: float) -> Iterator[int]:
        log("generate", prompt=tokens, temp=temp)
        self._turns += 1
        if MODE == "late" and self._turns > 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        while True:
            yield 7
