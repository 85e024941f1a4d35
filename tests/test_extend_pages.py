"""The pages of docs/extend name files that exist, and the kernel of kernel.md runs as it stands."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "extend").glob("*.md"))
NAMED = re.compile(r"`((?:paceline|tests)/[\w/]+\.py)`")
PLACEHOLDERS = ("NAME", "ENDPOINT")


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = set(NAMED.findall(text)) | set(re.findall(r"(?m)^--- (\S+)$", text))
    named |= {file for line in re.findall(r"(?m)^pytest (.*)$", text) for file in line.split("#")[0].split()}
    missing = [file for file in sorted(named) if not (ROOT / file).exists()]
    assert [file for file in missing if not any(word in file for word in PLACEHOLDERS)] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "extend" / "README.md").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index] == []


def test_the_kernel_does_what_its_test_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, test = blocks(ROOT / "docs" / "extend" / "kernel.md")
    file = tmp_path / "logit_bias.py"
    file.write_text(kernel)  # a file, because Triton reads the source of its kernels
    spec = importlib.util.spec_from_file_location("logit_bias", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    names: dict[str, Any] = {}
    exec(compile(test, "kernel.md", "exec"), names)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names["test_biases_are_those_of_the_host"](module.add_bias, device)
