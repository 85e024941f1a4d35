"""The compiled backend computes what the torch backend computes, and quantized, nearly so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.backends.cpu import CpuBackend
from paceline.backends.cpu.weights.packing import pack
from paceline.backends.torch.backend import TorchBackend
from paceline.errors import BackendError, ConfigError
from paceline.models.checkpoint import Checkpoint
from paceline.models.transformer import attention, blocks
from paceline.models.transformer.attention import attend
from tests.backends.cpu.checkpoints import floats
from tests.backends.cpu.numbers import assert_same_bits, quantize
from tests.backends.cpu.unpacking import unpack
from tests.backends.driver import Driven, drive, run
from tests.tiny_families import FAMILIES

CLOSE = 1e-4
LENGTH = 40
MAX_ROWS = 48

#       ┌ 1 ─ 3 ─ 6          two roots (0 and 5), siblings, and branches whose rows interleave,
#   0 ──┤                    so that no path but the first is contiguous
#       └ 2 ─ 4 ─ 7
#   5 ─ 8
PARENTS = [-1, 0, 0, 1, 2, -1, 3, 4, 5]
TOKENS = [11, 22, 33, 44, 44, 55, 61, 64, 0]


@dataclass(frozen=True)
class Pair:
    """The same weights in torch and in compiled code."""

    checkpoint: Checkpoint
    reference: TorchBackend
    backend: CpuBackend
    known: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    @property
    def prompt(self) -> list[int]:
        return np.random.default_rng(1).integers(0, self.checkpoint.config.vocab_size, LENGTH).tolist()  # type: ignore[no-any-return]

    def request(self) -> Driven:
        return drive(self.backend, pages_each=6)[0]

    def expected(self, tokens: Sequence[int]) -> np.ndarray:
        """torch's logits [tokens, vocab]."""
        text = tuple(tokens)
        if text not in self.known:
            self.known[text] = drive(self.reference, pages_each=6)[0].run(tokens)
        return self.known[text]


@pytest.fixture(scope="module", params=[*FAMILIES, "blocks", "uneven"])
def pair(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]) -> Iterator[Pair]:
    checkpoint = checkpoint_of(request.param)
    backend = CpuBackend.load(checkpoint, quantization="none", threads=2, max_rows=MAX_ROWS)
    yield Pair(checkpoint, TorchBackend.load(checkpoint), backend)
    backend.close()


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint_of("qwen2")


@pytest.fixture(scope="module", params=["none", "int8"])
def backend(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[CpuBackend]:
    backend = CpuBackend.load(checkpoint, quantization=request.param, threads=2, max_rows=MAX_ROWS)
    yield backend
    backend.close()


def path_to(row: int) -> list[int]:
    """Rows of the tree from a root down to `row`."""
    return [*path_to(PARENTS[row]), row] if row >= 0 else []


# Without quantization ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [40, 17, 1], ids=["one prefill", "chunks", "token by token"])
def test_logits_equal_torch_for_any_chunks_of_a_prompt(pair: Pair, chunk: int) -> None:
    request, prompt = pair.request(), pair.prompt
    logits = [request.extend(prompt[start : start + chunk]) for start in range(0, LENGTH, chunk)]
    np.testing.assert_allclose(np.concatenate(logits), pair.expected(prompt), rtol=0, atol=CLOSE)


def test_every_node_of_a_draft_tree_sees_its_own_path_only(pair: Pair) -> None:
    request, prompt = pair.request(), pair.prompt
    request.extend(prompt)
    logits = request.run(TOKENS, PARENTS)
    for leaf in set(range(len(TOKENS))) - set(PARENTS):
        rows = path_to(leaf)
        expected = pair.expected(prompt + [TOKENS[row] for row in rows])[len(prompt) :]
        np.testing.assert_allclose(logits[rows], expected, rtol=0, atol=CLOSE)


def test_two_interleaved_branches_longer_than_a_window(pair: Pair) -> None:
    """A window counts positions, not rows: here a parent lies two rows but one position before its child."""
    request, prompt = pair.request(), pair.prompt
    request.extend(prompt[:10])
    tokens = prompt[10:]
    logits = request.run(tokens, parents=[-1, -1, *range(len(tokens) - 2)])
    for branch in (0, 1):
        expected = pair.expected(prompt[:10] + tokens[branch::2])[10:]
        np.testing.assert_allclose(logits[branch::2], expected, rtol=0, atol=CLOSE)


def test_decoding_goes_on_from_a_committed_branch(pair: Pair) -> None:
    request, prompt = pair.request(), pair.prompt
    request.extend(prompt)
    request.run(TOKENS, PARENTS)
    accepted = path_to(7)
    request.commit(accepted)
    following = [5, 60, 33]
    logits = np.concatenate([request.extend([token]) for token in following])
    text = prompt + [TOKENS[row] for row in accepted] + following
    np.testing.assert_allclose(logits, pair.expected(text)[-len(following) :], rtol=0, atol=CLOSE)


def test_a_mixed_batch_gives_each_request_its_own_logits(pair: Pair) -> None:
    prompt = pair.prompt
    decoding, drafting, prefilling = drive(pair.backend, pages_each=6, count=3)
    decoding.extend(prompt[:20])
    drafting.extend(prompt[5:38])
    requests = [decoding.ask([7]), drafting.ask(TOKENS, PARENTS), prefilling.ask(prompt[:30][::-1])]
    # the decode, the drafted leaf 6, and the last row of the prefill
    logits = run(requests, logit_rows=[0, 1 + 6, 1 + len(TOKENS) + 29]).logits
    leaf = [TOKENS[row] for row in path_to(6)]
    for got, text in zip(logits, [[*prompt[:20], 7], prompt[5:38] + leaf, prompt[:30][::-1]], strict=True):
        np.testing.assert_allclose(got, pair.expected(text)[-1], rtol=0, atol=CLOSE)


def test_features_are_those_of_torch(pair: Pair) -> None:
    """In the order asked for, of all rows, also where no logits are wanted.

    Of 20 rows: later ones are 1e-4 from those of float64 with either backend.
    """
    layers = (pair.checkpoint.config.num_layers, 0, 1)
    found, expected = (
        run([drive(backend, pages_each=6)[0].ask(pair.prompt[:20])], logit_rows=[], feature_layers=layers)
        for backend in (pair.backend, pair.reference)
    )
    assert found.features is not None
    assert expected.features is not None
    np.testing.assert_allclose(found.features, expected.features, rtol=1e-5, atol=CLOSE)
    assert found.logits.shape == (0, pair.checkpoint.config.vocab_size)


def test_features_do_not_change_the_logits(backend: CpuBackend) -> None:
    tokens = [3, 1, 4, 1, 5]
    with_features = run([drive(backend, 1)[0].ask(tokens)], feature_layers=(1, 3)).logits.copy()
    assert_same_bits(with_features, drive(backend, 1)[0].run(tokens))


# Quantized -----------------------------------------------------------------------------------------


def error_of(logits: np.ndarray, expected: np.ndarray) -> float:
    """The root mean square error of a row in units of the logits' spread.

    The median over rows, because a row whose router was undecided may take another expert.
    """
    return float(np.median(np.sqrt(np.mean((logits - expected) ** 2, axis=1))) / expected.std())


@pytest.mark.parametrize("quantization", ["native", "int8"])
def test_quantized_logits_are_near_float32(pair: Pair, quantization: str) -> None:
    backend = CpuBackend.load(pair.checkpoint, quantization=quantization, threads=2, max_rows=MAX_ROWS)
    logits, expected = drive(backend, pages_each=6)[0].run(pair.prompt), pair.expected(pair.prompt)
    backend.close()
    # random weights this large have sharp attention, which magnifies what rounding does
    assert 0 < error_of(logits, expected) < 0.12
    assert (
        np.median([np.corrcoef(got, want)[0, 1] for got, want in zip(logits, expected, strict=True)]) > 0.99
    )


@pytest.mark.parametrize("quantization", ["native", "int8"])
@pytest.mark.parametrize("name", ["blocks", "uneven", "qwen2", "qwen3"])
def test_quantization_rounds_weights_activations_and_the_cache_and_nothing_else(
    checkpoint_of: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str, quantization: str
) -> None:
    checkpoint = checkpoint_of(name)
    backend = CpuBackend.load(checkpoint, quantization=quantization, threads=2, max_rows=MAX_ROWS)
    prompts = np.random.default_rng(1).integers(0, checkpoint.config.vocab_size, (5, 3)).tolist()
    logits = [drive(backend, pages_each=1)[0].run(prompt) for prompt in prompts]
    backend.close()
    tensors = {
        key: floats(unpack(pack(tensor, quantization))[: tensor.shape[0], : tensor.shape[1]])
        if len(tensor.shape) == 2
        else tensor
        for key, tensor in checkpoint.tensors.items()
    }
    rounded = TorchBackend.load(replace(checkpoint, tensors=tensors))
    monkeypatch.setattr(blocks, "F", SimpleNamespace(linear=_linear_of_rounded, silu=F.silu))
    monkeypatch.setattr(attention, "attend", _attend_to_halves)
    # one rounding that falls the other way, after the last bit of a sum did, disturbs all later rows:
    # so short prompts, and the median
    expected = [drive(rounded, pages_each=1)[0].run(prompt) for prompt in prompts]
    assert error_of(np.concatenate(logits), np.concatenate(expected)) < 1e-5


def _linear_of_rounded(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    depth = hidden.shape[1]
    integers, scale = quantize(F.pad(hidden, (0, -depth % 32)).numpy())
    values = (integers * scale[..., None]).reshape(len(hidden), -1)[:, :depth]
    return F.linear(torch.from_numpy(values), weight, bias)


def _attend_to_halves(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *others: Any
) -> torch.Tensor:
    return attend(query, keys.half().float(), values.half().float(), *others)


@pytest.mark.parametrize("quantization", ["native", "int8", "none"])
@pytest.mark.parametrize("name", ["blocks", "uneven", "qwen3"])
def test_any_number_of_threads_gives_the_same_bits_every_time(
    checkpoint_of: Callable[[str], Checkpoint], name: str, quantization: str
) -> None:
    found = []
    for threads in (1, 2, 3, 2):
        backend = CpuBackend.load(
            checkpoint_of(name), quantization=quantization, threads=threads, max_rows=48
        )
        request = drive(backend, pages_each=3)[0]
        found.append([request.extend([*range(20, 50)]), request.run(TOKENS, PARENTS), request.extend([3])])
        backend.close()
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert_same_bits(got, want)


def test_auto_keeps_the_blocks_of_the_file(checkpoint: Checkpoint) -> None:
    backend = CpuBackend.load(checkpoint, threads=1, max_rows=4)
    assert backend.quantization == "native"
    assert (backend.name, backend.batch_invariant, backend.supports_features) == ("cpu", True, True)


# Storage -------------------------------------------------------------------------------------------


def test_bytes_per_page_is_the_size_of_a_page(backend: CpuBackend) -> None:
    pool = backend.make_pool(3)
    assert pool.data.nbytes == 3 * pool.bytes_per_page == 3 * backend.bytes_per_page()
    assert pool.num_pages == 3


def test_pages_hold_everything_that_a_token_writes(backend: CpuBackend) -> None:
    """A page copied byte for byte into another pool goes on as the first one would."""
    first, prompt = drive(backend, 2)[0], [*range(20)]
    first.extend(prompt)
    second = Driven(backend, backend.make_pool(first.pool.num_pages), first.pages)
    second.pool.data[:] = first.pool.data  # type: ignore[attr-defined]
    second.context_length = 20
    assert_same_bits(second.run([7, 8]), first.run([7, 8]))


def test_move_reads_every_source_before_it_writes(backend: CpuBackend) -> None:
    """Places 0, 1, 2 turn in a circle: three turns bring every byte home, and none before that."""
    request = drive(backend, 2)[0]
    request.extend([*range(20)])
    pool = request.pool
    before = pool.data.copy()  # type: ignore[attr-defined]
    places = np.array([request.place(0), request.place(17), request.place(2)], np.int32)
    same = []
    for _ in range(3):
        backend.move(pool, places, np.roll(places, 1))
        same.append(np.array_equal(pool.data, before))  # type: ignore[attr-defined]
    assert same == [False, False, True]


def test_an_empty_move_changes_nothing(backend: CpuBackend) -> None:
    request = drive(backend, 1)[0]
    request.extend([1, 2, 3])
    before = request.pool.data.copy()  # type: ignore[attr-defined]
    backend.move(request.pool, np.zeros(0, np.int32), np.zeros(0, np.int32))
    np.testing.assert_array_equal(request.pool.data, before)  # type: ignore[attr-defined]


def test_more_logits_than_before_find_room(backend: CpuBackend) -> None:
    one = drive(backend, 3)[0].run([5])
    assert_same_bits(drive(backend, 3)[0].run([5, *range(40)])[:1], one)


# Mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int3"}, "cpu backend must be one of auto, none, native, int8, int4, got 'int3'"),
        ({"threads": 0}, "threads is 0, but a pass needs at least 1"),
        ({"threads": -2}, "threads is -2"),
    ],
)
def test_what_cannot_be_loaded_says_what_to_choose(
    checkpoint: Checkpoint, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CpuBackend.load(checkpoint, **options)  # type: ignore[arg-type]


def test_a_pool_too_large_for_the_memory_says_what_to_do(backend: CpuBackend) -> None:
    with pytest.raises(BackendError, match=r"No memory for a KV pool of 10000000000000 pages.*lower"):
        backend.make_pool(10**13)
