"""Exactness on a real model: the cpu backend's bits do not depend on the batch either."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend
from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.trees import DraftPlan
from paceline.engine.admission import Limits
from paceline.models.registry import load_checkpoint
from tests.engines import new_engine
from tests.tiny import save_checkpoint
from tests.tiny_families import VOCAB_SIZE
from tests.toy import ToyTokenizer
from tests.toy_drafter import ScriptedDrafter

OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "seed": 3},
]


class Tokenizer(ToyTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def requests():
    for number in range(16):
        length = [1, 5, 16, 17, 33, 90][number % 6]
        ids = np.random.default_rng(number).integers(2, VOCAB_SIZE, length).tolist()
        options = OPTIONS[number % 3] | {"max_tokens": 6 + number, "logprobs": 2, "ignore_eos": True}
        yield ids, SamplingParams(**options)


def run(backend, wanted, num_pages=200, max_num_seqs=16, rows=64, drafter=None):
    """Tokens and log-probabilities of the wanted requests, run together."""
    engine = new_engine(
        backend,
        Tokenizer(),
        Limits(VOCAB_SIZE, 160, max_num_seqs, rows),
        num_pages=num_pages,
        controller=FixedController(DraftPlan("scripted", 5, branching=2)) if drafter else None,
        drafters={"scripted": drafter} if drafter else {},
    )
    added = [engine.add_request(ids, params)[0] for ids, params in wanted]
    while engine.has_unfinished:
        engine.step()
    for request in added:
        assert request.error is None
    return [(request.output_token_ids, request.logprobs) for request in added], engine


@pytest.fixture(scope="module", params=["qwen2", "mistral-window"])
def backend(request, tmp_path_factory):
    folder = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return CpuBackend.load(load_checkpoint(folder), quantization="int8", threads=2, max_rows=64)


@pytest.fixture(scope="module")
def alone(backend):
    return [run(backend, [one])[0][0] for one in requests()]


def test_same_bytes_in_a_batch(backend, alone):
    assert run(backend, requests())[0] == alone


@pytest.mark.parametrize("rows", [3, 7])
def test_same_bytes_with_tiny_prefill_chunks(backend, alone, rows):
    assert run(backend, requests(), max_num_seqs=3, rows=rows)[0] == alone


def test_same_bytes_with_preemption_and_prefix_hits(backend, alone):
    results, engine = run(backend, [*requests(), *requests()], num_pages=12)
    assert results == alone + alone
    assert engine.scheduler.num_preemptions > 0
    results, engine = run(backend, [*requests(), *requests()])
    assert results == alone + alone
    assert engine.kv.prefix_hits > 0


@pytest.mark.parametrize("style", ["right", "partly", "tree"])
def test_same_bytes_with_drafts(backend, alone, style):
    truth = {tuple(ids): alone[number][0] for number, (ids, _) in enumerate(requests())}
    assert run(backend, requests(), drafter=ScriptedDrafter(truth, style))[0] == alone
