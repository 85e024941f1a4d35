"""`pip install paceline` has no torch: the cpu backend does without, and what needs it names the extra."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.errors import BackendError, ModelError
from paceline.extras import needs_extra
from paceline.models.heads.checkpoint import read_weights
from paceline.models.registry import load_checkpoint
from tests.models.model_files import config_of, random_tensors, write_gguf

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

WITHOUT_TORCH = """
import sys
for name in ("torch", "triton", "transformers", "opentelemetry.exporter", "msgpack", "zmq"):
    sys.modules[name] = None  # an import of it fails
"""

GENERATE = """
from paceline import LLM, SamplingParams
from paceline.models.heads.checkpoint import load_head
from paceline.models.heads.shipped import SHIPPED
llm = LLM(sys.argv[1], threads=1, max_model_len=64)
(output,) = llm.generate({"prompt_token_ids": [5, 6, 5, 6]}, SamplingParams(max_tokens=8, ignore_eos=True))
print(len(output.outputs[0].token_ids))
for folder in sorted((SHIPPED / "eagle3").iterdir()):
    print(folder.name, load_head(folder).tensors["fc.weight"].float32().ndim)
"""

COMMANDS = """
from benchmarks.__main__ import app as benchmarks
from paceline.cli import app, main
for line in sys.stdin.read().splitlines():
    name, *sys.argv[1:] = line.split()
    try:
        main(benchmarks if name == "benchmarks" else app)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


def run_without_torch(
    program: str, *arguments: str, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + program, *arguments],
        input=stdin,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_cpu_backend_generates_and_shipped_heads_load_without_torch(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama", random_tensors(config_of("llama")))
    ended = run_without_torch(GENERATE, str(model))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "8\nqwen2.5-coder-1.5b 2\nsmollm2-135m 2\n"


def test_what_needs_torch_says_which_extra_to_install(tmp_path: Path) -> None:
    lines = {
        f"paceline train eagle3 --out {tmp_path}/new": "`paceline train` needs the module torch: "
        "run `pip install 'paceline[train]'`.",
        "paceline serve --otlp-endpoint http://localhost:4318": "`--otlp-endpoint` needs the module "
        "opentelemetry.exporter.otlp: run `pip install 'paceline[otel]'`.",
        "paceline serve --kv-events-endpoint tcp://*:5557": "`--kv-events-endpoint` needs the module "
        "msgpack: run `pip install 'paceline[gateway]'`.",
        "benchmarks gpu": "`python -m benchmarks gpu` needs the module torch: "
        "run `pip install 'paceline[gpu]'`.",
    }
    ended = run_without_torch(COMMANDS, stdin="\n".join(lines))
    assert ended.stderr.splitlines() == [said for text in lines.values() for said in (f"error: {text}", "2")]


def test_an_import_that_fails_names_what_needs_it_and_the_extra() -> None:
    with (
        pytest.raises(
            BackendError, match=r"^it needs the module nowhere: run `pip install 'paceline\[gpu\]'`"
        ),
        needs_extra("gpu", "it", BackendError),
    ):
        import nowhere  # noqa: F401


def test_the_torch_backend_and_pickled_heads_name_their_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = write_gguf(tmp_path / "tiny.gguf", "llama", random_tensors(config_of("llama")))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError, match=r"the torch backend needs .* 'paceline\[torch\]'"):
        load_backend(load_checkpoint(tiny), BackendOptions(backend="torch"), 16)
    with pytest.raises(BackendError, match=r"torch backend, chosen because .* in bfloat16 on a CPU, needs"):
        load_backend(load_checkpoint(tiny), BackendOptions(device="cpu", dtype="bfloat16"), 16)
    with pytest.raises(ModelError, match=r"head\.bin, a pickle of torch, needs .* 'paceline\[torch\]'"):
        read_weights(tmp_path / "head.bin")


def test_a_missing_module_of_our_own_is_not_a_user_error() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("gpu", "it"):
        import paceline.nowhere  # noqa: F401


def test_torch_is_an_extra_that_others_imply() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert not any(line.startswith("torch") for line in project["dependencies"])
    extras = project["optional-dependencies"]
    assert extras["torch"] == ["torch>=2.11"]
    assert all("paceline[torch]" in extras[name] for name in ("gpu", "train"))
    assert "paceline[gpu,train,otel,gateway]" in extras["dev"]


def test_compilation_is_announced_before_it_begins(tmp_path: Path) -> None:
    program = "from paceline.terminal.session import announce_compilation; announce_compilation()\n"
    program += "print('paceline.backends.cpu' in sys.modules)"  # its import compiles
    ended = run_without_torch(program, PACELINE_HOME=str(tmp_path))
    assert ended.stderr == "compiling kernels, once per machine: this takes one to two minutes\n"
    assert ended.stdout == "False\n"
