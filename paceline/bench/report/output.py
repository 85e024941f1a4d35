"""Output of a result: terminal, JSON file and HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.bench.machine import machine_facts
from paceline.bench.report.page import html_page
from paceline.bench.report.result import Result
from paceline.bench.report.terminal import print_result
from paceline.errors import ConfigError

QUIET_LOAD = 0.5  # load average of the last minute


class Report:
    """Shows one result in all requested forms, with the machine."""

    def __init__(self, json_file: Path | None, html_file: Path | None = None) -> None:
        """Raise ConfigError for a file that cannot be written, before minutes are spent on its contents."""
        check_writable("--json", json_file)
        check_writable("--html", html_file)
        self._json_file = json_file
        self._html_file = html_file
        self._machine = machine_facts()  # before the measurement, for its load average

    def show(self, result: Result) -> None:
        """Print the result, and write the files."""
        notes = machine_notes(
            self._machine, result.facts.get("threads"), result.facts.get("quantization"), result.timed
        )
        print_result(result, notes)
        if self._json_file is not None:
            facts = {**result.facts, "machine": self._machine}
            self._json_file.write_text(json.dumps(facts, indent=2) + "\n")
        if self._html_file is not None:
            self._html_file.write_text(html_page(result, notes), encoding="utf-8")


def machine_notes(
    machine: Mapping[str, Any], threads: object, quantization: object, timed: bool = True
) -> list[str]:
    """The machine in one line, and a warning if other work on it may have changed timings."""
    load = machine["load_average"]
    line = (
        f"{machine['cpu']} ({machine['isa']}), {machine['usable_cores']} of {machine['cores']} cores usable, "
        + (f"{threads} threads, quantization {quantization}, " if threads else "")
        + f"load {load}"
    )
    if load <= QUIET_LOAD or not timed:
        return [line]
    # engines that split work evenly and meet at barriers suffer more than ours, so ratios change too
    return [
        line,
        f"Load average {load} at the start: other work was running, so times and ratios may be off. "
        "Measure again on a quiet machine.",
    ]


def check_writable(option: str, file: Path | None) -> None:
    """Raise ConfigError if the file cannot be written."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        raise ConfigError(f"{option} {file} cannot be written: give a file in a folder that exists.")
