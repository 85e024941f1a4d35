"""Ranks as processes, with gloo between them: the same bits, and a clear error when one is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM
from paceline.backends.torch import backend as torch_backend
from paceline.backends.torch.backend import TorchBackend
from paceline.backends.torch.parallel.ranks import start_ranks
from paceline.core.params import SamplingParams
from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint
from paceline.models.registry import load_checkpoint
from tests.backends.adapters import random_adapters
from tests.backends.driver import drive
from tests.backends.torch.sharded import save_sharded
from tests.backends.torch.test_tensor_parallel import PROMPT, assert_same_bits, needs_cuda, passes
from tests.draft.model.test_draft_model_cpu import save_tokenizer
from tests.large import LARGE

DEADLINE = 60  # seconds for what happens at once on an idle machine
only_large = pytest.mark.skipif(not LARGE, reason="starts processes: run it with `make test-large`")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(save_sharded("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def load(checkpoint: Checkpoint) -> Iterator[Callable[..., TorchBackend]]:
    """Loads a model on several ranks, which are stopped when the test ends."""
    loaded: list[TorchBackend] = []

    def make(size: int, **options: Any) -> TorchBackend:
        loaded.append(TorchBackend.load(checkpoint, tensor_parallel_size=size, **options))
        return loaded[-1]

    yield make
    for backend in loaded:
        backend.close()
        wait_for_end(processes(backend))


def processes(backend: TorchBackend) -> list[int]:
    assert backend.ranks is not None
    return backend.ranks.processes


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank goes on"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_two_processes_give_the_bits_of_one_and_end_when_one_is_killed(
    checkpoint: Checkpoint, load: Callable[..., TorchBackend]
) -> None:
    adapters = random_adapters(checkpoint.config)
    backend, one = load(2, adapters=adapters), TorchBackend.load(checkpoint, adapters=adapters)
    assert_same_bits(passes(backend), passes(one))
    assert_same_bits(passes(backend, ("a", "b")), passes(one, ("a", "b")))
    (request,) = drive(backend, pages_each=6)
    request.extend(PROMPT)
    (rank,) = processes(backend)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(BackendError, match=rf"rank 1 \(process {rank}\) was killed by SIGKILL.*restart"):
        request.extend([1])
    with pytest.raises(BackendError, match="was killed by SIGKILL"):  # not another reason, and at once
        request.extend([1])


@only_large
@pytest.mark.parametrize(("size", "dtype"), [(4, "float32"), (4, "bfloat16")])
def test_many_processes_give_the_bits_of_one(
    checkpoint: Checkpoint, load: Callable[..., TorchBackend], size: int, dtype: str
) -> None:
    assert_same_bits(passes(load(size, dtype=dtype)), passes(TorchBackend.load(checkpoint, dtype=dtype)))


@needs_cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_processes_that_share_a_gpu_give_the_bits_of_one(
    checkpoint: Checkpoint, load: Callable[..., TorchBackend], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    one = TorchBackend.load(checkpoint, dtype=dtype, device="cuda")
    shared = [torch.device("cuda", 0)] * 2
    monkeypatch.setattr(torch_backend, "find_devices", lambda name, count: shared)
    assert_same_bits(passes(load(2, dtype=dtype, device="cuda")), passes(one))


@only_large
def test_a_rank_that_is_killed_among_four_ends_all(load: Callable[..., TorchBackend]) -> None:
    backend = load(4)
    (request,) = drive(backend, pages_each=6)
    os.kill(processes(backend)[1], signal.SIGKILL)
    with pytest.raises(BackendError, match=r"rank 2 \(process \d+\) was killed by SIGKILL"):
        request.extend(PROMPT)
    wait_for_end(processes(backend))


@only_large
def test_a_rank_that_hangs_is_reported_when_the_time_is_over(
    load: Callable[..., TorchBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "start_ranks", partial(start_ranks, timeout=3.0))
    backend = load(2)
    (request,) = drive(backend, pages_each=6)
    (rank,) = processes(backend)
    os.kill(rank, signal.SIGSTOP)
    with pytest.raises(BackendError, match=r"A rank of tensor parallelism is gone.*[Tt]imed out"):
        request.extend(PROMPT)
    wait_for_end([rank])


@only_large
def test_a_rank_that_cannot_load_says_why(checkpoint: Checkpoint, tmp_path: Path) -> None:
    gone = replace(checkpoint, source=tmp_path / "gone")
    with pytest.raises(BackendError, match=r"rank 1: \w+: .*gone"):
        TorchBackend.load(gone, tensor_parallel_size=2)


@only_large
def test_ranks_end_when_the_engine_is_killed(checkpoint: Checkpoint) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from paceline.backends.torch.backend import TorchBackend\n"
        "from paceline.models.registry import load_checkpoint\n"
        "backend = TorchBackend.load(load_checkpoint(Path(sys.argv[1])), tensor_parallel_size=2)\n"
        "print(*backend.ranks.processes, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script, str(checkpoint.source)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    wait_for_end([int(pid) for pid in ended.stdout.split()])


@only_large
def test_a_draft_model_on_as_many_ranks_as_its_target(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("qwen2", "llama")}
    for family, folder in folders.items():
        folder.mkdir()
        save_tokenizer(save_sharded(family, folder))

    def generate(size: int) -> tuple[list[int], int]:
        draft = {"model": str(folders["llama"]), "draft_tensor_parallel_size": size}
        llm = LLM(
            str(folders["qwen2"]),
            backend="torch",
            threads=1,
            max_model_len=200,
            tensor_parallel_size=size,
            speculative_config={"method": "draft_model", **draft},
        )
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
        answer = llm.generate([PROMPT], params, use_tqdm=False)[0]
        llm.close()
        return answer.outputs[0].token_ids, answer.metrics.speculative.num_draft_tokens

    assert generate(2) == generate(1)
