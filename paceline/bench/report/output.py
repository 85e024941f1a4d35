"""Output of a result: terminal, JSON file and HTML page."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.bench.report.page import html_page
from paceline.bench.report.result import Finding, Result
from paceline.bench.report.terminal import print_result
from paceline.errors import ConfigError
from paceline.machine import cpu_name, find_gpu, has_amx, total_memory, usable_cores, version_of

PACKAGES = ("paceline", "numpy", "numba", "llvmlite", "tokenizers")
# load average of the last minute, per usable core, above which timings vary, and above which they mislead
NOTED_LOAD = 0.1
BUSY_LOAD = 0.5
LEAST_LOAD = 0.5  # below it nothing is said: the shell that started the run counts too


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
        # first, because it puts the other findings in doubt
        result = replace(result, findings=[*busy_findings(self._machine, result.timed), *result.findings])
        print_result(result, notes)
        if self._json_file is not None:
            facts = {**result.facts, "machine": self._machine}
            self._json_file.write_text(json.dumps(facts, indent=2) + "\n")
        if self._html_file is not None:
            self._html_file.write_text(html_page(result, notes), encoding="utf-8")


def machine_facts() -> dict[str, object]:
    """CPU, cores, instruction set, memory, load and versions, as JSON values."""
    from paceline.backends.cpu.primitives.isa import ISA  # here, because it imports numba

    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "usable_cores": usable_cores(),
        "isa": ISA.name,
        "amx": has_amx(),
        "gpu": find_gpu().name or None,
        "memory_bytes": total_memory(),
        "load_average": round(os.getloadavg()[0], 2),  # above 0 before a bench starts: the machine is busy
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
    }


def machine_notes(
    machine: Mapping[str, Any], threads: object, quantization: object, timed: bool = True
) -> list[str]:
    """The machine in one line, and a remark if other work on it may have changed timings a little."""
    load, cores = machine["load_average"], machine["usable_cores"]
    words = [f"{machine['cpu']} ({machine['isa']})", f"{cores} of {machine['cores']} cores usable"]
    words += [machine["gpu"]] if machine["gpu"] else []
    words += [f"{threads} threads"] if threads else []
    words += [f"{quantization} weights"] if quantization else []
    line = ", ".join([*words, f"load {load}"])
    if timed and max(LEAST_LOAD, NOTED_LOAD * cores) < load <= BUSY_LOAD * cores:
        return [line, f"Load average {load} at the start; timings may vary by a few percent."]
    return [line]


def busy_findings(machine: Mapping[str, Any], timed: bool = True) -> list[Finding]:
    """A warning if other work on the machine makes timings misleading."""
    load, cores = machine["load_average"], machine["usable_cores"]
    if not timed or load <= max(LEAST_LOAD, BUSY_LOAD * cores):
        return []
    text = (
        f"Load average {load} of {cores} cores at the start: other work was running. "
        "Measure again on a quiet machine."
    )
    return [Finding(text, good=False)]


def check_writable(option: str, file: Path | None) -> None:
    """Raise ConfigError if the file cannot be written."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        raise ConfigError(f"{option} {file} cannot be written: give a file in a folder that exists.")
