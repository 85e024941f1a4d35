"""The reference backend computes what transformers computes, however the rows are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from paceline.backends.torch.backend import TorchBackend, ancestors, kv_slots
from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint
from paceline.models.registry import load_checkpoint
from tests.backends.driver import Driven, drive, run
from tests.large import LARGE, REPEATS, repeated
from tests.tiny import random_model, save_checkpoint
from tests.tiny_families import (
    FAMILIES,
    MORE_FAMILIES,
    MORE_HYBRIDS,
    ROPES_BY_LENGTH,
    TORCH_FAMILIES,
    VOCAB_SIZE,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT = np.random.default_rng(1).integers(0, VOCAB_SIZE, 40).tolist()
CLOSE = 1e-4
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

#       ┌ 1 ─ 3 ─ 6          two roots (0 and 5), siblings, and branches whose rows interleave,
#   0 ──┤                    so that no path but the first is contiguous
#       └ 2 ─ 4 ─ 7
#   5 ─ 8
TREE_PARENTS = [-1, 0, 0, 1, 2, -1, 3, 4, 5]
TREE_TOKENS = [11, 22, 33, 44, 44, 55, 66, 172, 0]


# What a row sees is decided by its layer's attention or state: one family of each kind. Others have these
# layers between other blocks, of which a pass over a mixed batch shows as much as many passes.
KINDS = ("llama", "qwen2-some-windows", "ministral3", "gemma4", "llama4", "deepseek-v3", "gpt-oss")
KINDS += ("lfm2", "qwen3-5", "granite-hybrid")
# Their blocks are those of others, in the same order: they differ in angles, or in what of a block they have.
LIKE_OTHERS = ("llama-attention-bias", "llama-llama3-rope", "llama-linear-rope", "llama-yarn-rope", "phi3")
LIKE_OTHERS += ("qwen2", "qwen3-moe-raw-weights", "ministral", "phi3-partial-rope")


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and in our backend."""

    family: str
    reference: PreTrainedModel
    checkpoint: Checkpoint
    backend: TorchBackend
    known: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    def request(self) -> Driven:
        return drive(self.backend, pages_each=6)[0]

    def expected(self, tokens: Sequence[int]) -> np.ndarray:
        """transformers' logits [tokens, vocab]."""
        text = tuple(tokens)
        if text not in self.known:
            with torch.inference_mode():
                self.known[text] = self.reference(torch.tensor([text])).logits[0].numpy()
        return self.known[text]


@pytest.fixture(scope="module", params=[*FAMILIES, *TORCH_FAMILIES, *repeated(*MORE_FAMILIES, *MORE_HYBRIDS)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    checkpoint = load_checkpoint(save_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))
    return Pair(request.param, random_model(request.param), checkpoint, TorchBackend.load(checkpoint))


@pytest.fixture
def kind(pair: Pair) -> Pair:
    if pair.family not in KINDS and not LARGE:
        pytest.skip("repeats what a family with such layers tries: run it with `make test-large`")
    return pair


@pytest.fixture
def composed(pair: Pair) -> Pair:
    if pair.family in LIKE_OTHERS and not LARGE:
        pytest.skip("repeats what a family with these blocks tries: run it with `make test-large`")
    return pair


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(save_checkpoint("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def llama(checkpoint: Checkpoint) -> TorchBackend:
    return TorchBackend.load(checkpoint)


def path_to(row: int) -> list[int]:
    """Rows of TREE from a root down to `row`."""
    return [*path_to(TREE_PARENTS[row]), row] if row >= 0 else []


def assert_chunks_are_true(pair: Pair, starts: Sequence[int]) -> None:
    request = pair.request()
    logits = [request.extend(PROMPT[start:end]) for start, end in pairwise([*starts, len(PROMPT)])]
    np.testing.assert_allclose(np.concatenate(logits), pair.expected(PROMPT), rtol=0, atol=CLOSE)


def test_logits_equal_transformers_for_chunks_of_a_prompt(pair: Pair) -> None:
    assert_chunks_are_true(pair, [0, 17, 34])


@pytest.mark.parametrize(
    "starts",
    [*repeated([0]), [0, *range(24, 40)], *repeated(range(40))],
    ids=["one prefill", "the last token by token", "token by token"],
)
def test_logits_equal_transformers_for_any_chunks_of_a_prompt(kind: Pair, starts: Sequence[int]) -> None:
    assert_chunks_are_true(kind, starts)


def test_every_node_of_a_draft_tree_sees_its_own_path_only(kind: Pair) -> None:
    request = kind.request()
    request.extend(PROMPT)
    logits = request.run(TREE_TOKENS, TREE_PARENTS)
    for leaf in set(range(len(TREE_TOKENS))) - set(TREE_PARENTS):
        rows = path_to(leaf)
        expected = kind.expected(PROMPT + [TREE_TOKENS[row] for row in rows])[len(PROMPT) :]
        np.testing.assert_allclose(logits[rows], expected, rtol=0, atol=CLOSE)


def test_two_interleaved_branches_longer_than_a_window(kind: Pair) -> None:
    """A window counts positions, not rows: here a parent lies two rows but one position before its child."""
    request = kind.request()
    request.extend(PROMPT[:10])
    tokens = PROMPT[10:]
    logits = request.run(tokens, parents=[-1, -1, *range(len(tokens) - 2)])
    for branch in (0, 1):
        expected = kind.expected(PROMPT[:10] + tokens[branch::2])[10:]
        np.testing.assert_allclose(logits[branch::2], expected, rtol=0, atol=CLOSE)


def test_decoding_continues_from_a_committed_branch(kind: Pair) -> None:
    request = kind.request()
    request.extend(PROMPT)
    request.run(TREE_TOKENS, TREE_PARENTS)
    accepted = path_to(7)
    request.commit(accepted)
    following = [5, 120, 77]
    logits = np.concatenate([request.extend([token]) for token in following])
    text = PROMPT + [TREE_TOKENS[row] for row in accepted] + following
    np.testing.assert_allclose(logits, kind.expected(text)[-len(following) :], rtol=0, atol=CLOSE)


def test_a_mixed_batch_gives_each_request_its_own_logits(pair: Pair) -> None:
    decoding, drafting, prefilling = drive(pair.backend, pages_each=6, count=3)
    decoding.extend(PROMPT[:20])
    drafting.extend(PROMPT[5:38])
    requests = [decoding.ask([7]), drafting.ask(TREE_TOKENS, TREE_PARENTS), prefilling.ask(PROMPT[::-1])]
    # the decode, the drafted leaf 6, and the last row of the prefill
    logits = run(requests, logit_rows=[0, 1 + 6, 1 + len(TREE_TOKENS) + len(PROMPT) - 1]).logits
    leaf = [TREE_TOKENS[row] for row in path_to(6)]
    for got, text in zip(logits, [[*PROMPT[:20], 7], PROMPT[5:38] + leaf, PROMPT[::-1]], strict=True):
        np.testing.assert_allclose(got, pair.expected(text)[-1], rtol=0, atol=CLOSE)


@REPEATS
def test_64_greedy_tokens_are_those_of_transformers(pair: Pair) -> None:
    request, text = drive(pair.backend, pages_each=7)[0], list(PROMPT)
    logits = request.extend(PROMPT)
    for _ in range(64):
        text.append(int(logits[-1].argmax()))
        logits = request.extend(text[-1:])
    expected = list(PROMPT)
    while len(expected) < len(text):
        expected.append(int(pair.expected(expected)[-1].argmax()))
    assert text == expected


def test_features_are_the_hidden_states_of_transformers(composed: Pair) -> None:
    request = composed.request()
    last = composed.checkpoint.config.num_layers
    output = run([request.ask(PROMPT)], logit_rows=[], feature_layers=(0, 2, last))
    # transformers' last hidden state is already normed, ours is not: take what its norm is given
    given: list[torch.Tensor] = []
    names = ("norm", "embedding_norm", "norm_f", "final_layernorm")
    model = composed.reference.model
    norm = next(getattr(model, name) for name in names if hasattr(model, name))
    hook = norm.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    with torch.inference_mode():
        states = composed.reference(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    hook.remove()
    expected = torch.cat((states[0][0], states[2][0], given[0][0]), dim=-1)
    assert output.features is not None
    close = max(CLOSE, 1e-5 * float(expected.abs().max()))  # sums of large numbers, in another order
    np.testing.assert_allclose(output.features, expected.numpy(), rtol=1e-5, atol=close)
    assert output.logits.shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_bfloat16_is_near_float32(composed: Pair, device: str) -> None:
    short = TorchBackend.load(composed.checkpoint, device=device, dtype="bfloat16")
    logits = drive(short, pages_each=3)[0].run(PROMPT)
    assert logits.dtype == np.float32
    # 8 bits of mantissa through three layers, for logits that spread over two units; the median,
    # because a row whose router was undecided may take another expert
    assert 0 < np.median(np.abs(logits - composed.expected(PROMPT))) < 0.1


@pytest.mark.parametrize("family", ROPES_BY_LENGTH)
@pytest.mark.parametrize("context", [20, 40])
def test_a_rope_that_depends_on_the_context_is_that_of_the_served_one(
    family: str, context: int, tmp_path: Path
) -> None:
    """transformers has other angles for texts of other lengths; ours are those of a full context."""
    stored = load_checkpoint(save_checkpoint(family, tmp_path))
    served = replace(stored, config=stored.config.for_context(context))
    with torch.inference_mode():
        expected = random_model(family)(torch.tensor([PROMPT[:context]])).logits[0].numpy()
    request = drive(TorchBackend.load(served), pages_each=6)[0]
    logits = [request.extend(PROMPT[start : min(start + 9, context)]) for start in range(0, context, 9)]
    np.testing.assert_allclose(np.concatenate(logits), expected, rtol=0, atol=CLOSE)


@needs_cuda
def test_cuda_computes_what_transformers_does(pair: Pair) -> None:
    request = drive(TorchBackend.load(pair.checkpoint, device="cuda"), pages_each=6)[0]
    prefill = request.extend(PROMPT)
    tree = request.run(TREE_TOKENS, TREE_PARENTS)
    request.commit(path_to(7))
    decode = request.extend([5])
    expected = pair.expected([*PROMPT, *(TREE_TOKENS[row] for row in path_to(7)), 5])
    got = np.concatenate((prefill, tree[path_to(7)], decode))
    np.testing.assert_allclose(got, expected, rtol=0, atol=CLOSE)


def test_move_reads_every_source_before_it_writes(llama: TorchBackend) -> None:
    pool = llama.make_pool(1)
    pool.cache.keys[-1][:] = torch.arange(16)[None, :, None, None]
    llama.move(pool, np.array([0, 1, 2], np.int32), np.array([1, 2, 0], np.int32))
    assert pool.cache.keys[-1][-1, :4, 0, 0].tolist() == [2, 0, 1, 3]


def test_bytes_per_page_is_the_size_of_a_page(llama: TorchBackend) -> None:
    pool = llama.make_pool(3)
    stored = sum(tensor.nbytes for tensor in (*pool.cache.keys, *pool.cache.values))
    assert stored == 3 * pool.bytes_per_page == 3 * llama.bytes_per_page()


def test_ancestors_of_a_tree() -> None:
    table = ancestors(np.array(TREE_PARENTS, np.int32))
    assert [np.flatnonzero(row).tolist() for row in table] == [path_to(row) for row in range(len(table))]


def test_kv_slots_follow_the_page_table() -> None:
    places = kv_slots(np.array([7, 2, -1], np.int32), 18)
    assert places.tolist() == [*range(112, 128), 32, 33]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "no dtype 'float16'; choose one of float32, bfloat16"),
        ({"device": "tpu9"}, "choose cpu, cuda or cuda:N"),
        ({"device": "meta"}, "choose cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "choose device cpu, or install a torch build with CUDA"),
        ({"max_rows": 0}, "give 1 or more"),
    ],
)
def test_what_cannot_be_loaded_says_what_to_choose(
    checkpoint: Checkpoint, options: dict[str, object], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        TorchBackend.load(checkpoint, **options)


def test_a_model_too_large_for_its_device_says_what_to_do(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("paceline.backends.torch.loading.Transformer", out_of_memory)
    with pytest.raises(BackendError, match=r"does not fit into the memory of cpu.*choose bfloat16"):
        TorchBackend.load(checkpoint)


def test_a_pool_too_large_for_its_device_says_what_to_do(llama: TorchBackend) -> None:
    with pytest.raises(BackendError, match=r"No memory for a KV pool of 10000000000000 pages.*fewer pages"):
        llama.make_pool(10**13)
