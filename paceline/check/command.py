"""`paceline check`: this machine, what paceline selected for it, and self-tests."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from paceline.backends.options import BackendOptions
from paceline.config import DEFAULT_MODEL
from paceline.core.verdict import Logprob
from paceline.errors import BackendError, PacelineError
from paceline.extras import needs_extra
from paceline.home import paceline_home
from paceline.kv.sizing import available_memory
from paceline.machine import cpu_name, find_gpu, total_memory, usable_cores, version_of
from paceline.terminal.session import announce_compilation

GPU_TEST = "kernels on the GPU"
DIGEST_TEST = "same bits as other CPUs"
# Digests of what the cpu backend gives for the first prompt below; every machine gives the same
MODEL_DIGESTS = {DEFAULT_MODEL: "3e8699c39f11ea2a"}
PACKAGES = ("paceline", "numpy", "numba", "llvmlite", "tokenizers", "safetensors", "torch", "triton")
# CPU features that decide which kernels are compiled
FEATURES: tuple[str, ...] = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni")
FEATURES += ("avxvnni", "neon", "dotprod", "i8mm", "sve")
COLD = "cold: the first run compiles for about a minute"
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time", "1, 2, 3, 4,")

Facts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test."""

    name: str
    status: str  # ok | failed | skipped
    detail: str


@dataclass(frozen=True)
class Report:
    """The facts and test outcomes of `paceline check`."""

    facts: Facts  # by section
    outcomes: list[Outcome]

    @property
    def passed(self) -> bool:
        """Whether no test failed; skipped tests count as passed."""
        return all(outcome.status != "failed" for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**self.facts, "tests": [asdict(outcome) for outcome in self.outcomes], "passed": self.passed}


def check(model: str | None = None, with_torch: bool = False) -> Report:
    """The report on this machine. Also tests `model`, or the default model if it is already downloaded."""
    announce_compilation()
    facts: Facts = {"machine": machine(), "gpu": gpu_facts(), "kernels": kernels(), "versions": versions()}
    facts["models"] = models()
    if with_torch:
        facts["torch"] = torch_facts()
    tests = [_guarded(DIGEST_TEST, digest_outcome), _guarded(GPU_TEST, gpu_outcome)]
    tests.append(_guarded("model", lambda: model_outcome(model)))
    return Report(facts, [*kernel_outcomes(), *tests])


def machine() -> dict[str, Any]:
    """Processor and memory."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable cores": usable_cores(),
        "memory": f"{total_memory() / 2**30:.1f} GiB",
        "available memory": f"{available_memory() / 2**30:.1f} GiB",
    }


def kernels() -> dict[str, Any]:
    """The instruction sets that the cpu backend uses, and whether its kernels are compiled."""
    from paceline.backends.cpu_kernels import cache_folder
    from paceline.kernel_cache import cached_kernels

    files = cached_kernels(cache_folder())
    size = sum(path.stat().st_size for path in files)
    from paceline.backends.cpu.primitives.isa import (  # after listing the files: this import compiles some
        ISA,
        target_features,
    )

    features = target_features()
    return {
        "instruction set": ISA.name,
        "description": ISA.description,
        "features": " ".join(name for name in FEATURES if name in features) or "none of note",
        "cache": f"warm: {len(files)} files, {size / 1e6:.1f} MB" if files else COLD,
        "cache folder": str(cache_folder()),
    }


def versions() -> dict[str, Any]:
    """Versions of Python and of the relevant packages, without importing them."""
    installed = {package: version_of(package) or "not installed" for package in PACKAGES}
    return {"python": platform.python_version(), "executable": sys.executable, **installed}


def models() -> dict[str, Any]:
    """The models folder, and which aliases are downloaded."""
    from paceline.models.registry import ALIASES, is_pulled

    states = {name: "fetched" if is_pulled(name) else "not fetched" for name in ALIASES}
    return {"home": str(paceline_home()), **states}


def gpu_facts() -> dict[str, Any]:
    """The GPU, and which backend `--backend auto` chooses because of it."""
    gpu, choice = find_gpu(), BackendOptions().choice
    named = {"gpu": gpu.name} if gpu.name else {}
    return {**named, **dict(gpu.facts), "backend": f"{choice.name}: {choice.why}"}


def torch_facts() -> dict[str, Any]:
    """The devices that torch sees."""
    try:
        with needs_extra("torch", "--torch"):
            import torch
    except (ImportError, PacelineError) as error:
        return {"torch": f"cannot be imported: {error}"}
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.cuda.is_available()}
    for number in range(torch.cuda.device_count()):
        facts[f"cuda:{number}"] = torch.cuda.get_device_name(number)
    return facts


def kernel_outcomes() -> Iterator[Outcome]:
    """One outcome per weight format: compiled kernels compared with numpy."""
    from paceline.check.kernels import CASES, compare

    for name, case in CASES.items():
        yield _guarded(f"kernel {name}", lambda case=case: compare(case))  # type: ignore[misc]


def digest_outcome() -> str:
    """Summary of the digest of a fixed generation."""
    from paceline.check.digest import compare_digest

    return compare_digest()


def gpu_outcome() -> str:
    """Summary of the cuda backend's kernels compared with torch; skipped without a GPU."""
    gpu = find_gpu()
    if not gpu.usable:
        raise Skipped(gpu.missing)
    from paceline.check.gpu import compare_gpu

    return compare_gpu()


def model_outcome(model: str | None) -> str:
    """Summary of a model's outputs alone, repeated and batched; skipped if there is no model.

    All three runs must agree in every token and in every bit of every log-probability, and with the digest of
    the model, if it is a known one.
    """
    from paceline.check.digest import summary
    from paceline.core.params import SamplingParams
    from paceline.llm import LLM
    from paceline.models.registry import is_pulled

    if model is None and not is_pulled(DEFAULT_MODEL):
        raise Skipped(f"run `paceline models pull {DEFAULT_MODEL}` first, or give --model")
    # no prefix caching, so that every run computes everything
    llm = LLM(model or DEFAULT_MODEL, backend="cpu", enable_prefix_caching=False, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    alone, again = (llm.generate(PROMPTS[0], params)[0].outputs[0] for _ in range(2))
    crowd = llm.generate(list(reversed(PROMPTS)), params)[-1].outputs[0]
    for where, other in (("a second time", again), ("among other requests", crowd)):
        if (other.token_ids, other.logprobs) != (alone.token_ids, alone.logprobs):
            raise BackendError(f"{where} it gave {other.text!r}, or other bits; alone {alone.text!r}")
    name, found = model or DEFAULT_MODEL, _digest(alone.token_ids, alone.logprobs)
    told = summary(found, MODEL_DIGESTS[name]) if name in MODEL_DIGESTS else f"digest {found}"
    return f"{name} gives the same bits alone, again and among other requests; {told}"


def _digest(tokens: list[int], logprobs: list[dict[int, Logprob]] | None) -> str:
    """A digest of the tokens of an output and of the bits of their log-probabilities."""
    bits = [{token: one.logprob.hex() for token, one in sorted(step.items())} for step in logprobs or []]
    return hashlib.sha256(repr((list(tokens), bits)).encode()).hexdigest()[:16]


class Skipped(Exception):
    """A test that cannot run here, and why."""


def _guarded(name: str, test: Callable[[], str]) -> Outcome:
    """The outcome of a test. `test` returns a summary, or raises."""
    try:
        return Outcome(name, "ok", test())
    except Skipped as reason:
        return Outcome(name, "skipped", str(reason))
    except PacelineError as error:
        return Outcome(name, "failed", str(error))
    except Exception as error:  # report any failure, whatever it is
        return Outcome(name, "failed", f"{type(error).__name__}: {error}")


def show(report: Report) -> None:
    """Print the report as tables."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, facts in report.facts.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in facts.items():
            table.add_row(Text(name, style="dim"), Text(str(value)))
        console.print(table, "")
    table = Table(title="tests", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    styles = {"ok": "green", "failed": "bold red", "skipped": "yellow"}
    for outcome in report.outcomes:
        table.add_row(
            Text(outcome.name), Text(outcome.status, style=styles[outcome.status]), Text(outcome.detail)
        )
    console.print(table)
