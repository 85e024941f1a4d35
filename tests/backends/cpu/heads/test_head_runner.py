"""The compiled runner of draft heads computes what the torch runner computes, with the target's threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend, CpuHeadRunner
from paceline.backends.heads import HeadOutput, HeadRunner
from paceline.backends.torch.backend import TorchBackend
from paceline.backends.torch.head_runner import TorchHeadRunner
from paceline.errors import BackendError, ConfigError
from paceline.models.checkpoint import Checkpoint
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.config import HeadConfig
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.cpu.random_heads import draft, extend, random_slots
from tests.backends.driver import drive
from tests.large import LARGE, repeated
from tests.models.heads.driver import DrivenHead, drive_heads, random_checkpoint, run_heads
from tests.models.heads.tiny_heads import CONFIGS, EAGLE3, P_EAGLE

CLOSE = 1e-4
LENGTH = 40
MAX_ROWS = 48
PAGES = 6
# two roots, siblings, and branches whose rows interleave
PARENTS = [-1, 0, 0, 1, 2, -1, 3, 4, 5]


@dataclass(frozen=True)
class Pair:
    """The same head in torch and in compiled code."""

    config: HeadConfig
    reference: HeadRunner
    runner: CpuHeadRunner

    def both(self, work: Callable[[HeadRunner], HeadOutput]) -> tuple[HeadOutput, HeadOutput]:
        return work(self.runner), work(self.reference)


@pytest.fixture(scope="module")
def target(checkpoint_of: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint_of("llama-attention-bias")  # its embedding and its head are two matrices


HEADS = {**CONFIGS, "p-eagle": P_EAGLE}  # of several layers


@pytest.fixture(scope="module", params=HEADS.values(), ids=HEADS)
def pair(request: pytest.FixtureRequest, target: Checkpoint) -> Iterator[Pair]:
    head = random_checkpoint(request.param)
    backend = CpuBackend.load(target, quantization="none", threads=2, max_rows=MAX_ROWS)
    reference = TorchHeadRunner.load(head, TorchBackend.load(target), MAX_ROWS)
    yield Pair(head.config, reference, CpuHeadRunner(head, backend, MAX_ROWS))
    backend.close()


@pytest.fixture(scope="module", params=["int8", "none"])
def backend(request: pytest.FixtureRequest, target: Checkpoint) -> Iterator[CpuBackend]:
    backend = CpuBackend.load(target, quantization=request.param, threads=2, max_rows=MAX_ROWS)
    yield backend
    backend.close()


def assert_close(pair: tuple[HeadOutput, HeadOutput]) -> None:
    found, expected = pair
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.states, expected.states, rtol=1e-5, atol=CLOSE)


# Without quantization -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [*repeated(LENGTH), 17, 1], ids=["at once", "in chunks", "slot by slot"])
def test_rows_after_the_targets_tokens_equal_torch(pair: Pair, chunk: int) -> None:
    if chunk == 1 and pair.config not in (P_EAGLE, CONFIGS["all flags"]) and not LARGE:
        pytest.skip("repeats what a drafted chain tries: run it with `make test-large`")
    tokens, features, _ = random_slots(pair.config, LENGTH)

    def work(runner: HeadRunner) -> HeadOutput:
        request, starts = drive_heads(runner, PAGES)[0], range(0, LENGTH, chunk)
        parts = [extend(request, tokens[at : at + chunk], features[at : at + chunk]) for at in starts]
        logits, states = zip(*((part.logits, part.states) for part in parts), strict=True)
        return HeadOutput(np.concatenate(logits), np.concatenate(states))

    assert_close(pair.both(work))


def test_features_so_small_that_the_epsilon_of_their_norm_counts_equal_torch(pair: Pair) -> None:
    tokens, features, _ = random_slots(pair.config, LENGTH)
    assert_close(pair.both(lambda runner: extend(drive_heads(runner, PAGES)[0], tokens, 0.002 * features)))


def test_a_drafted_chain_equals_torch(pair: Pair) -> None:
    tokens, features, _ = random_slots(pair.config, LENGTH)

    def work(runner: HeadRunner) -> HeadOutput:
        request = drive_heads(runner, PAGES)[0]
        last = extend(request, tokens[:30], features[:30])
        for token in tokens[30:]:
            last = draft(request, [token], last.states[-1:])
            request.length += 1
        return last

    assert_close(pair.both(work))


def test_a_tree_equals_torch(pair: Pair) -> None:
    tokens, features, states = random_slots(pair.config, LENGTH)
    nodes = len(PARENTS)

    def work(runner: HeadRunner) -> HeadOutput:
        request = drive_heads(runner, PAGES)[0]
        extend(request, tokens[:30], features[:30])
        return draft(request, tokens[-nodes:], states[-nodes:], PARENTS)

    assert_close(pair.both(work))


def test_a_batch_of_several_requests_equals_torch(pair: Pair) -> None:
    tokens, features, _ = random_slots(pair.config, LENGTH)

    def work(runner: HeadRunner) -> HeadOutput:
        requests = drive_heads(runner, PAGES, 3)
        extend(requests[0], tokens[:20], features[:20])
        extend(requests[1], tokens[3:35], features[3:35])
        parts = slice(20, 21), slice(35, 38), slice(5, LENGTH)
        batch = [r.ask(features[part], tokens[part]) for r, part in zip(requests, parts, strict=True)]
        return run_heads(batch, from_target=True, outputs=[0, 3, 10, 38])

    assert_close(pair.both(work))


# Quantized ------------------------------------------------------------------------------------------


WIDE = replace(EAGLE3, vocab_size=300, draft_vocab_size=300, hidden_size=256, target_hidden_size=256)


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.03), ("int4", 0.3)])
@pytest.mark.parametrize(
    ("config", "model", "of_target"),
    [
        (CONFIGS["all flags"], "llama-attention-bias", "int8"),
        (CONFIGS["target's head"], "llama-attention-bias", "int8"),
        (CONFIGS["eagle with bias"], "llama-attention-bias", "int8"),
        (replace(WIDE, own_lm_head=False), "blocks", "native"),
    ],
    ids=["all flags", "target's head", "eagle", "target of 4 bits"],
)
def test_a_quantized_head_is_near_torch(
    checkpoint_of: Callable[[str], Checkpoint],
    config: HeadConfig,
    model: str,
    of_target: str,
    quantization: str,
    bound: float,
) -> None:
    head, target = random_checkpoint(config), checkpoint_of(model)
    backend = CpuBackend.load(target, quantization=of_target, threads=2, max_rows=MAX_ROWS)
    reference = TorchHeadRunner.load(head, TorchBackend.load(target), MAX_ROWS)
    tokens, features, states = random_slots(config, LENGTH)
    found = []
    for runner in (CpuHeadRunner(head, backend, MAX_ROWS, quantization), reference):
        request = drive_heads(runner, PAGES)[0]
        extend(request, tokens[:30], features[:30])
        found.append(draft(request, tokens[30:], states[30:]))
    backend.close()
    quantized, exact = found
    for got, want in ((quantized.logits, exact.logits), (quantized.states, exact.states)):
        assert bound / 100 < np.sqrt(np.mean((got - want) ** 2)) / want.std() < bound


def test_a_head_of_4_bits_reads_features_by_a_matrix_of_8(target: Checkpoint) -> None:
    """Columns of `fc` differ as features do: 4 bits would lose the small ones, which read large features."""
    spread = np.where(np.arange(EAGLE3.feature_width) % 2, 4.0, 0.25).astype(np.float32)
    random = random_checkpoint(EAGLE3)
    matrix = encode(random.tensors["fc.weight"].float32() * spread)
    head = replace(random, tensors={**random.tensors, "fc.weight": matrix})
    backend = CpuBackend.load(target, quantization="int8", threads=1, max_rows=MAX_ROWS)
    tokens, features, _ = random_slots(EAGLE3, LENGTH)
    reference = TorchHeadRunner.load(head, TorchBackend.load(target), MAX_ROWS)
    runners = (CpuHeadRunner(head, backend, MAX_ROWS, "int4"), reference)
    found, exact = (extend(drive_heads(each, PAGES)[0], tokens, features / spread).logits for each in runners)
    backend.close()
    assert np.sqrt(np.mean((found - exact) ** 2)) / exact.std() < 0.2


# Pages ----------------------------------------------------------------------------------------------


def told(request: DrivenHead, tokens: list[int], states: np.ndarray) -> HeadOutput:
    """The outputs of a tree after the request."""
    nodes = len(PARENTS)
    return draft(request, tokens[-nodes:], states[-nodes:], PARENTS)


def test_a_pass_without_outputs_writes_the_same_keys_and_values(backend: CpuBackend) -> None:
    runner = CpuHeadRunner(random_checkpoint(EAGLE3), backend, MAX_ROWS)
    tokens, features, _ = random_slots(EAGLE3, LENGTH)
    telling, silent = drive_heads(runner, PAGES)[0], drive_heads(runner, PAGES)[0]
    nothing = run_heads([silent.ask(features, tokens)], from_target=True, outputs=[])
    extend(telling, tokens, features)
    assert nothing.logits.shape == (0, EAGLE3.draft_vocab_size)
    assert nothing.states.shape == (0, EAGLE3.hidden_size)
    np.testing.assert_array_equal(silent.pool.data, telling.pool.data)  # type: ignore[attr-defined]


def test_kv_index_0_of_a_head_is_never_read(backend: CpuBackend) -> None:
    """Index 0 and what lies behind the rows hold no number, and it does not show."""
    runner = CpuHeadRunner(random_checkpoint(EAGLE3), backend, MAX_ROWS)
    tokens, features, states = random_slots(EAGLE3, LENGTH)
    for length in (1, 7, 15, 16, 30):
        clean, spoilt = drive_heads(runner, PAGES)[0], drive_heads(runner, PAGES)[0]
        spoilt.pool.data.fill(0xFF)  # type: ignore[attr-defined]
        for request in (clean, spoilt):
            extend(request, tokens[:length], features[:length])
        expected, found = told(clean, tokens, states), told(spoilt, tokens, states)
        assert np.isfinite(found.logits).all()
        assert_same_bits(found.logits, expected.logits)
        assert_same_bits(found.states, expected.states)


def test_bytes_per_page_is_the_size_of_a_page(backend: CpuBackend) -> None:
    runner = CpuHeadRunner(random_checkpoint(EAGLE3), backend, MAX_ROWS)
    pool = runner.make_pool(3)
    assert pool.data.nbytes + pool.features.nbytes == 3 * runner.bytes_per_page()
    assert (runner.page_size, runner.max_rows) == (backend.page_size, MAX_ROWS)


# Beside the target ----------------------------------------------------------------------------------


def test_weights_of_the_target_are_shared_not_copied(backend: CpuBackend) -> None:
    own = CpuHeadRunner(random_checkpoint(CONFIGS["own embedding"]), backend, MAX_ROWS)
    shared = CpuHeadRunner(random_checkpoint(CONFIGS["target's head"]), backend, MAX_ROWS)
    assert shared.workspace.embedding is backend.workspace.embedding
    assert shared.workspace.lm_head is backend.workspace.lm_head
    assert own.workspace.embedding is not backend.workspace.embedding
    assert own.workspace.lm_head is not backend.workspace.lm_head


def test_passes_of_the_head_and_of_the_target_take_turns(backend: CpuBackend) -> None:
    runner = CpuHeadRunner(random_checkpoint(EAGLE3), backend, MAX_ROWS)
    tokens, features, states = random_slots(EAGLE3, LENGTH)
    request, model = drive_heads(runner, PAGES)[0], drive(backend, PAGES)[0]
    extend(request, tokens, features)
    expected, said = told(request, tokens, states), model.run(tokens)
    for _ in range(20):
        assert_same_bits(told(request, tokens, states).logits, expected.logits)
        assert_same_bits(model.run(tokens), said)


def test_an_odd_head_size_is_refused(backend: CpuBackend) -> None:
    with pytest.raises(BackendError, match=r"even head size, not 15.*backend='torch'"):
        CpuHeadRunner(random_checkpoint(replace(EAGLE3, head_dim=15)), backend, MAX_ROWS)


def test_a_head_of_an_unquantized_target_cannot_be_quantized(target: Checkpoint) -> None:
    backend = CpuBackend.load(target, quantization="none", threads=1, max_rows=MAX_ROWS)
    with pytest.raises(ConfigError, match="cannot be int4 beside a target that is not quantized; leave out"):
        CpuHeadRunner(random_checkpoint(EAGLE3), backend, MAX_ROWS, "int4")
