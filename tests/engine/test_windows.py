"""Sliding windows free pages: a long text needs as many as its window, and its bytes stay the same."""

from __future__ import annotations

import pytest

from paceline.backends.cpu import CpuBackend
from paceline.backends.torch.backend import TorchBackend
from paceline.core.params import SamplingParams
from paceline.models.registry import load_checkpoint
from tests.engine.test_exactness_cpu import run
from tests.tiny import save_checkpoint
from tests.toy_drafter import ScriptedDrafter

FEW = 6  # pages; the texts of both requests take 2 * 4, their windows of 9 tokens 2 * 2 and a draft
WANTED = [
    (
        [3 + number, 40, 8, 2, 90, 17],
        SamplingParams(temperature=number, seed=5, max_tokens=56, ignore_eos=True),
    )
    for number in range(2)
]


@pytest.fixture(scope="module", params=["torch", "cpu"])
def backend(request, tmp_path_factory):
    checkpoint = load_checkpoint(save_checkpoint("mistral-window", tmp_path_factory.mktemp("windows")))
    if request.param == "cpu":
        return CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=64)
    return TorchBackend.load(checkpoint, max_rows=64, row_by_row=True)


@pytest.fixture(scope="module")
def alone(backend):
    """The tokens of each request when no page is taken by another."""
    return [run(backend, [one])[0][0] for one in WANTED]


@pytest.mark.parametrize("style", [None, "tree"])
def test_few_pages_are_enough_and_texts_stay_the_same(backend, alone, style):
    truth = {tuple(ids): alone[number][0] for number, (ids, _) in enumerate(WANTED)}
    drafter = ScriptedDrafter(truth, style) if style else None
    results, engine = run(backend, WANTED, num_pages=FEW, drafter=drafter)
    assert results == alone
    assert engine.scheduler.num_preemptions == 0


def test_a_text_continues_after_its_cached_prefix(backend, alone):
    whole = WANTED[0][0] + alone[0][0]
    longer = (whole, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    (expected,), _ = run(backend, [longer])
    results, engine = run(backend, [WANTED[0], longer], max_num_seqs=1)
    assert results == [alone[0], expected]
    assert engine.kv.prefix_hits == len(whole) // 16 * 16 - 16 * (len(whole) % 16 == 0)


def test_pages_released_too_early_are_noticed(tmp_path):
    checkpoint = load_checkpoint(save_checkpoint("qwen2", tmp_path))
    backend = CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=64)
    alone = [run(backend, [one])[0][0] for one in WANTED]
    backend.attention_window = 9  # it has none
    assert run(backend, WANTED, num_pages=FEW)[0] != alone
