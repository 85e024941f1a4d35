"""examples/clients/matrix.py: what is installed is tried, what is not is named, and a failure is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server.process import ServerProcess
from tests.serve.conftest import KEY

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "clients"


def matrix(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The finished run of the script."""
    command = [sys.executable, str(FOLDER / "matrix.py"), "--url", f"{url}/v1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.real
def test_the_official_client_passes_and_another_that_is_missing_breaks_nothing(
    real_server: ServerProcess,
) -> None:
    run = matrix(real_server.url, "--api-key", KEY, "--only", "openai,Vercel AI SDK", "--json")
    openai, vercel = json.loads(run.stdout)
    assert openai["cells"] == dict.fromkeys(("plain", "streamed", "tools", "structured"), "ok"), openai
    if vercel["version"] is None:
        assert vercel["note"] == "not installed: npm install --prefix examples/clients"
        assert run.returncode == 0


@pytest.mark.real
def test_a_cell_that_fails_is_named_with_its_error(real_server: ServerProcess) -> None:
    run = matrix(real_server.url, "--api-key", "sk-wrong", "--model", "x", "--only", "openai")
    assert run.returncode == 1
    assert re.search(r"\| openai \| [\d.]+ \| failed \| failed \| failed \| failed \| – \|", run.stdout)
    assert "openai, plain: AuthenticationError" in run.stdout


def test_a_server_that_is_not_there_is_an_error_with_the_remedy() -> None:
    run = matrix("http://127.0.0.1:9")
    assert run.returncode == 2
    assert "http://127.0.0.1:9/v1/models cannot be read" in run.stderr
    assert "paceline serve" in run.stderr


def test_every_client_of_the_matrix_is_in_the_guide() -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        from matrix import CLIENTS  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(FOLDER))
    page = (ROOT / "docs" / "guides" / "clients.md").read_text()
    for client in CLIENTS:
        assert (FOLDER / f"{client.module}.py").exists()
        assert re.search(rf"(?m)^\| {re.escape(client.name)} \| [\d.]+ \|", page), (
            f"no result of {client.name}"
        )
        assert f"examples/clients/{client.module}.py" in page
