"""Commands run as a user runs them, with the JSON that they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer import Typer
from typer.testing import CliRunner

from paceline.bench.commands import app as bench


def run(*arguments: str, app: Typer = bench) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run_json(folder: Path, *arguments: str, app: Typer = bench) -> dict[str, Any]:
    output = run(*arguments, "--json", str(folder / "facts.json"), app=app)
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    assert {"cpu", "cores", "isa", "versions"} <= set(facts["machine"])
    assert facts["machine"]["cpu"] in output
    return facts
