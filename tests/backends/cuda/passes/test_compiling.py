"""A warm-up's kernels are compiled in threads before they run, and then run as if compiled one by one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from paceline.backends.cuda.backend import CudaBackend
from paceline.backends.cuda.passes.compiling import cached_kernel, compile_only, compiled, compiles_only
from paceline.core.params import SamplingParams
from tests.backends.cuda.test_backend import make, needs_gpu
from tests.engines import new_engine
from tests.tiny import save_checkpoint
from tests.tiny_families import VOCAB_SIZE
from tests.toy import ToyTokenizer, drain

CPU = torch.device("cpu")


def test_a_kernel_is_compiled_by_a_thread_and_found_afterwards() -> None:
    makers: list[str] = []

    def make_kernel() -> str:
        makers.append(threading.current_thread().name)
        return "kernel"

    with compile_only(CPU):
        assert compiles_only()
        assert compiled("found", make_kernel) is compiled("found", make_kernel) is None
    assert not compiles_only()
    assert compiled("found", make_kernel) == compiled("found", make_kernel) == "kernel"
    assert len(makers) == 1
    assert makers != [threading.current_thread().name]


def test_a_kernel_that_failed_in_a_thread_raises_its_error_when_it_is_needed() -> None:
    def fail() -> None:
        raise RuntimeError("no such instruction")

    with compile_only(CPU):
        assert compiled("failing", fail) is None
    for _ in range(2):  # and does not wait for what will never be made
        with pytest.raises(RuntimeError, match="no such instruction"):
            compiled("failing", fail)


@pytest.mark.parametrize("ranks", [None, object()])
def test_compile_ahead_compiles_unless_there_are_other_ranks(
    ranks: object | None,
) -> None:
    calls: list[bool] = []
    backend: Any = SimpleNamespace(device=torch.device("cuda"), ranks=ranks)
    CudaBackend.compile_ahead(backend, lambda: calls.append(compiles_only()))
    assert calls == ([True] if ranks is None else [])


def test_what_is_found_while_compiling_is_not_kept() -> None:
    @cached_kernel
    def found(name: str) -> tuple[str, bool]:
        return name, compiles_only()

    with compile_only(CPU):
        assert found("kernel") == ("kernel", True)
    assert found("kernel") is found("kernel") == ("kernel", False)


def test_launches_run_again_after_an_error() -> None:
    run = triton.JITFunction.run

    def fail() -> None:
        assert triton.JITFunction.run is not run
        raise RuntimeError("of a warm-up")

    with pytest.raises(RuntimeError, match="warm-up"), compile_only(CPU):
        fail()
    assert triton.JITFunction.run is run
    assert not compiles_only()


def test_other_threads_launch_and_make_kernels_as_always_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool) -> bool:
        return not warmup

    monkeypatch.setattr(triton.JITFunction, "run", launch)

    def launches() -> tuple[bool, object]:
        key = f"of {threading.get_ident()}"
        return triton.JITFunction.run(None, grid=(1,), warmup=False), compiled(key, lambda: "kernel")

    with ThreadPoolExecutor(1) as other, compile_only(CPU):
        assert other.submit(launches).result() == (True, "kernel")
        assert launches() == (False, None)


@needs_gpu
def test_a_warm_up_after_compiling_ahead_compiles_nothing_and_gives_the_same_tokens(
    tmp_path: Path, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.engine.admission import Limits
    from paceline.models.registry import load_checkpoint

    checkpoint = load_checkpoint(save_checkpoint("llama", tmp_path / "llama"))
    found: list[Any] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **facts: found.append(facts["src"].name))

    def answer(ahead: bool) -> list[int]:
        backend = make(checkpoint, device, dtype)
        engine = new_engine(backend, ToyTokenizer(), Limits(VOCAB_SIZE, 96, 4, 32), num_pages=60)
        if ahead:
            engine.compile_ahead()
            assert found
            found.clear()
        engine._warm_up()
        if ahead:
            assert found == []
        request = engine.add_request([5, 3, 7], SamplingParams(temperature=1, seed=1, max_tokens=20))[0]
        drain(engine, scribble=False)
        return list(request.output_token_ids)

    first = answer(ahead=True)
    assert first == answer(ahead=False)
