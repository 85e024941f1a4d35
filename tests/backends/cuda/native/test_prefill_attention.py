"""Prefill attention in CUDA C++: the plain attention, and on a GPU the bits of the Triton kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.backends.cuda.kernels.attention.scoring import LLAMA_SCORING
from paceline.backends.cuda.native import decode_attention, prefill_attention
from paceline.backends.cuda.native.nvrtc import leaving_out
from paceline.backends.cuda.native.weight_pipeline import supports_pipeline
from paceline.core.forward import chain_parents
from tests.backends.cuda.emulating import Emulated, needs_compiler, tensor_map
from tests.backends.cuda.kernels.test_attention import PAGE_SIZE, Case

DIM = prefill_attention.DIM
is_hopper = torch.cuda.is_available() and supports_pipeline(torch.device("cuda"))
needs_hopper = pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")


def case_of(contexts: tuple[int, ...], counts: tuple[int, ...], heads: int, kv_heads: int) -> Case:
    chains = [chain_parents([count]).tolist() for count in counts]
    return Case(list(contexts), chains, heads, kv_heads, DIM)


def attended(case: Case, device: torch.device) -> torch.Tensor:
    """What all requests of a case give, all of whose rows are in prefill tiles."""
    large, longest = [True] * case.batch.num_requests, int(case.batch.positions.max()) + 1
    return case.run(device, torch.bfloat16, longest=longest, large=large, by=decode_attention.attend)


@needs_compiler
@pytest.mark.parametrize(
    ("contexts", "counts", "heads"),
    [((0, 700), (36, 1), 3), ((64 * 64 + 40,), (30,), 4)],
    ids=["chunks, and lanes that no head uses", "groups"],
)
def test_it_is_the_plain_attention(
    contexts: tuple[int, ...], counts: tuple[int, ...], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = prefill_attention.kernel_numbers(heads, 1, PAGE_SIZE, LLAMA_SCORING.scale(DIM))
    threads, runs = prefill_attention.THREADS, []
    kernel = Emulated(prefill_attention.SOURCES, "prefill_attention", "Arguments", numbers, threads, threads)
    monkeypatch.setattr(prefill_attention, "tensor_map", tensor_map)
    monkeypatch.setattr(prefill_attention, "supports_pipeline", lambda device: True)
    monkeypatch.setattr(prefill_attention, "prefill_kernel", lambda *given: runs.append(given) or kernel)
    case = case_of(contexts, counts, heads, 1)
    expected = case.expected(torch.bfloat16)
    for _ in range(2 if max(contexts) < 4096 else 1):  # copies arrive late, then at once
        torch.testing.assert_close(attended(case, torch.device("cpu")).float(), expected, rtol=0, atol=2e-2)
    assert runs


@needs_hopper
@pytest.mark.parametrize(
    ("contexts", "counts", "heads", "kv_heads"),
    [
        ((0, 5, 700), (36, 300, 1), 3, 1),
        ((0, 6000, 100, 4096), (500, 40, 7, 64), 8, 2),
        ((9000,), (130,), 32, 8),
        ((0, 64), (2048, 64), 16, 1),
    ],
)
def test_it_has_the_bits_of_triton(
    contexts: tuple[int, ...], counts: tuple[int, ...], heads: int, kv_heads: int, monkeypatch: Any
) -> None:
    case, device, runs = case_of(contexts, counts, heads, kv_heads), torch.device("cuda"), []
    run = prefill_attention.run_prefill

    def watched(*arguments: Any) -> bool:
        runs.append(run(*arguments))
        return runs[-1]

    monkeypatch.setattr(decode_attention, "run_prefill", watched)
    found = attended(case, device)
    with leaving_out(["prefill_attention"]):
        expected = attended(case, device)
    assert runs == [True, False]
    assert torch.isfinite(found.float()).all()
    assert torch.equal(found, expected)
