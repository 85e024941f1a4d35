"""`python -m benchmarks` as a process."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time

import pytest

from paceline import cli


def test_a_benchmark_told_to_stop_leaves_its_with_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stops a server there; without this they would outlive it."""
    left = []

    def measure(app: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            left.append(app)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    monkeypatch.setattr(cli, "main", measure)
    monkeypatch.delitem(sys.modules, "benchmarks.__main__", raising=False)  # where other tests imported it
    try:
        with pytest.raises(SystemExit) as stopped:
            runpy.run_module("benchmarks", run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(left) == 1
