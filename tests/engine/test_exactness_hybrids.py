"""Exactness of models with recurrent layers: every pass row by row, equal bits whatever else happens."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend
from paceline.backends.torch.backend import TorchBackend
from paceline.kv.states import SequenceStates
from paceline.models.needs import cached_values, state_bytes
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive
from tests.engine.test_exactness_cpu import requests, run
from tests.large import repeated
from tests.tiny import save_checkpoint
from tests.tiny_families import HYBRIDS, VOCAB_SIZE
from tests.toy_drafter import ScriptedDrafter

WANTED = [*requests()][:5]  # prompts of 1 to 33 tokens, and 6 to 10 more


def load(family, folder):
    return TorchBackend.load(load_checkpoint(save_checkpoint(family, folder)), max_rows=64, row_by_row=True)


def load_compiled(family, folder):
    checkpoint = load_checkpoint(save_checkpoint(family, folder))
    return CpuBackend.load(checkpoint, quantization="int8", threads=2, max_rows=64)


COMPILED = [f"cpu {family}" for family in ("qwen3-5", "lfm2", "granite-hybrid", "falcon-h1")]


@pytest.fixture(
    scope="module", params=["qwen3-5", *COMPILED, *repeated("lfm2", "qwen3-next", "granite-hybrid")]
)
def backend(request, tmp_path_factory):
    family = request.param.removeprefix("cpu ")
    loads = load_compiled if request.param in COMPILED else load
    return loads(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def wanted(backend):
    return WANTED if isinstance(backend, CpuBackend) else WANTED[1:4]  # torch is slow, row by row


@pytest.fixture(scope="module")
def alone(backend, wanted):
    return [run(backend, [one])[0][0] for one in wanted]


# which have the mixers of others
MIXED_ELSEWHERE = ("qwen3-next", "granite-hybrid")


@pytest.mark.parametrize(
    "family",
    [
        *(name for name in HYBRIDS if name not in MIXED_ELSEWHERE),
        "gemma4",
        "llama4",
        *repeated(*MIXED_ELSEWHERE),
    ],
)
def test_a_row_has_the_same_bits_in_a_chunk_in_a_tree_and_alone(family, tmp_path):
    backend = load(family, tmp_path)
    config = load_checkpoint(tmp_path).config
    assert backend.bytes_per_state == state_bytes(config)
    assert backend.bytes_per_page() == cached_values(config) * 4 * backend.page_size
    prompt = np.random.default_rng(1).integers(0, VOCAB_SIZE, 22).tolist()
    whole, single, drafting = drive(backend, pages_each=3, count=3)
    at_once = whole.extend(prompt)
    assert np.array_equal(at_once, np.concatenate([single.extend([token]) for token in prompt]))
    drafting.extend(prompt[:14])
    # the true continuation is every second node; its siblings are wrong
    tokens = [token for right in prompt[14:] for token in (right, (right + 1) % VOCAB_SIZE)]
    parents = [2 * (node // 2) - 2 if node > 1 else -1 for node in range(len(tokens))]
    assert np.array_equal(drafting.run(tokens, parents)[::2], at_once[14:])
    drafting.commit(range(0, 10, 2))
    assert np.array_equal(drafting.extend(prompt[19:]), at_once[19:])


def test_same_bytes_in_small_chunks_with_preemption_and_prefix_hits(backend, wanted, alone):
    results, engine = run(backend, [*wanted, *wanted], num_pages=3, max_num_seqs=4, rows=7)
    assert results == alone + alone
    assert engine.scheduler.num_preemptions > 0
    results, engine = run(backend, [*wanted, *wanted], max_num_seqs=3)
    assert results == alone + alone
    assert engine.kv.prefix_hits > 0


@pytest.mark.parametrize("style", ["partly", "tree"])
def test_same_bytes_with_drafts(backend, wanted, alone, style):
    truth = {tuple(ids): alone[number][0] for number, (ids, _) in enumerate(wanted)}
    assert run(backend, wanted, drafter=ScriptedDrafter(truth, style))[0] == alone


def test_a_state_after_other_rows_than_the_accepted_ones_is_noticed(backend, wanted, alone, plant):
    advance = type(backend).advance_state

    def careless(self, states, slot, rows, checkpoints):
        advance(self, states, slot, range(len(rows)), checkpoints)

    plant(type(backend), "advance_state", careless)
    truth = {tuple(ids): alone[number][0] for number, (ids, _) in enumerate(wanted)}
    assert run(backend, wanted, drafter=ScriptedDrafter(truth, "tree"))[0] != alone
    plant.assert_ran()


def test_a_prefix_that_begins_without_its_state_is_noticed(backend, wanted, alone, plant):
    plant(SequenceStates, "restore", lambda self, slot, serial: None)
    assert run(backend, [*wanted[2:], *wanted[2:]], max_num_seqs=1)[0] != alone[2:] * 2
    plant.assert_ran()
