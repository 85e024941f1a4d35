"""The README's examples are run, and give what it says they give."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest

from benchmarks.server.process import ServerProcess

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    """The fenced blocks of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.real
def test_the_shell_example(paceline):
    (console,) = blocks("console")
    examples = re.findall(r"^\$ paceline (.*)\n((?:(?!\$ ).*\n)*)", console, flags=re.MULTILINE)
    assert len(examples) == 2
    for command, output in examples:
        code, out, _ = paceline(*shlex.split(command))
        assert (code, out) == (0, output)


@pytest.mark.real
def test_the_python_example(capsys):
    (program,) = blocks("python")
    (output,) = blocks("text")
    exec(program, {})
    assert capsys.readouterr().out == output


@pytest.mark.real
def test_the_http_example():
    command = next(block for block in blocks("sh") if block.startswith("curl"))
    (content,) = blocks("json")
    body = json.loads(re.search(r"-d '(.*)'", command, flags=re.DOTALL)[1])
    with ServerProcess() as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == content.strip()
