"""Every bit is that of one device, however many ranks share a model, and each has its own part of it only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.backends.torch.loading import load_pieces, settle_bfloat16_kernels
from paceline.core.forward import Choices
from paceline.errors import BackendError, ConfigError
from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.registry import DEFAULT_MODEL, load_checkpoint, resolve
from paceline.models.transformer.blocks import Linear
from paceline.models.transformer.tensor_parallel import TensorParallel, check_size, count_pieces
from tests.backends.adapters import drive_with, random_adapters
from tests.backends.driver import drive, run
from tests.backends.torch.sharded import FAMILIES, VOCAB, save_sharded, sharded, thread_ranks
from tests.large import repeated
from tests.tiny import save_checkpoint
from tests.tiny_families import FAMILIES as TINY

PROMPT = np.random.default_rng(1).integers(0, VOCAB, 40).tolist()
TREE_PARENTS = [-1, 0, 0, 1, 2, -1, 3, 4, 5]
TREE_TOKENS = [11, 22, 33, 44, 44, 55, 66, 172, 0]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {
        family: load_checkpoint(save_sharded(family, tmp_path_factory.mktemp(family))) for family in FAMILIES
    }


@pytest.fixture(scope="module")
def llama(checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    return checkpoints["llama"]


def passes(backend: TorchBackend, adapters: Sequence[str] = ("", "")) -> list[np.ndarray]:
    """What a prefill, a tree, a commit, a mixed batch with choices, and the first layers give.

    Two requests, with these adapters.
    """
    first, second = drive_with(backend, 6, adapters)
    given = [first.extend(PROMPT), first.run(TREE_TOKENS, TREE_PARENTS)]
    first.commit([0, 2, 4, 7])
    second.extend(PROMPT[:7])
    choices = Choices(np.array([1, 3, 4], np.int32), np.arange(3, dtype=np.uint64), np.array([0.0, 0.7, 1.3]))
    mixed = run(
        [first.ask([5, 9]), second.ask(PROMPT[:3])],
        logit_rows=[0, 2],
        feature_layers=(0, 1, 3),
        choices=choices,
    )
    assert mixed.features is not None
    assert mixed.chosen is not None
    given += [mixed.logits.copy(), mixed.features.copy(), mixed.chosen.copy()]
    early, first.adapter = backend.first_layers(2), ""
    given.append(run([replace_backend(first, early).ask([5])]).logits.copy())
    embedded = backend.embed(torch.tensor([0, 172, 60], device=backend.device))  # as heads do
    return given + [array.float().cpu().numpy() for array in (embedded, backend.scores(embedded))]


def replace_backend(request: Any, backend: TorchBackend) -> Any:
    request.backend = backend
    return request


def assert_same_bits(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [array.tobytes() for array in got] == [array.tobytes() for array in expected]


CASES = [
    ("llama", "float32", 2),
    ("qwen2", "bfloat16", 4),
    ("mixtral", "float32", 4),
    ("qwen3", "float32", 8),
]
OTHERS = [
    (family, dtype, size)
    for family in FAMILIES
    for dtype in ("float32", "bfloat16")
    for size in (2, 4, 8)
    if (family, dtype, size) not in CASES
]


@pytest.mark.parametrize("case", [*CASES, *repeated(*OTHERS)], ids=str)
def test_every_pass_has_the_bits_of_one_device(
    checkpoints: dict[str, Checkpoint], case: tuple[str, str, int]
) -> None:
    family, dtype, size = case
    expected = passes(TorchBackend.load(checkpoints[family], dtype=dtype))
    with sharded(checkpoints[family], size, dtype) as backend:
        assert_same_bits(passes(backend), expected)


@pytest.mark.parametrize("case", [("llama", "float32", 4), ("mixtral", "bfloat16", 2)], ids=str)
def test_passes_with_adapters_have_the_bits_of_one_device(
    checkpoints: dict[str, Checkpoint], case: tuple[str, str, int]
) -> None:
    """In one pass: two adapters, or one and none."""
    (family, dtype, size), names = case, [("a", "b"), ("", "b")]
    adapters = random_adapters(checkpoints[family].config, everywhere=family == "mixtral")
    one = TorchBackend.load(checkpoints[family], dtype=dtype, adapters=adapters)
    expected = [passes(one, own) for own in names]
    assert not np.array_equal(expected[0][0], expected[1][0])
    with sharded(checkpoints[family], size, dtype, adapters=adapters) as backend:
        for own, bits in zip(names, expected, strict=True):
            assert_same_bits(passes(backend, own), bits)


# norms of all heads at once, and attention sinks with stacked experts
SPECIAL = ["olmo2", "gpt-oss"]
OTHER_FAMILIES = [family for family in TINY if family not in SPECIAL]


@pytest.mark.parametrize("family", [*SPECIAL, *repeated(*OTHER_FAMILIES)])
def test_every_family_has_the_bits_of_one_device(family: str, tmp_path: Path) -> None:
    """Tiny models of 2 KV heads."""
    checkpoint = load_checkpoint(save_checkpoint(family, tmp_path))
    expected = passes(TorchBackend.load(checkpoint))
    with sharded(checkpoint, count_pieces(checkpoint.config.num_kv_heads)) as backend:
        assert_same_bits(passes(backend), expected)


@needs_cuda
@pytest.mark.parametrize("case", [*CASES, *OTHERS], ids=str)
def test_every_pass_has_the_bits_of_one_gpu(
    checkpoints: dict[str, Checkpoint], case: tuple[str, str, int]
) -> None:
    """Logical ranks: threads that share one GPU."""
    family, dtype, size = case
    expected = passes(TorchBackend.load(checkpoints[family], dtype=dtype, device="cuda"))
    with sharded(checkpoints[family], size, dtype, device="cuda") as backend:
        assert_same_bits(passes(backend), expected)


def at_once(functions: list[Any]) -> list[Any]:
    """The results of functions that wait for each other."""
    results: list[Any] = [None] * len(functions)

    def keep(at: int) -> None:
        results[at] = functions[at]()

    threads = [Thread(target=keep, args=(at,)) for at in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


# out of 8 pieces of these, some sum in another order than the whole, here and elsewhere
REAL_SHAPES = [(4096, 1024), *repeated((4096, 4096), (4096, 14336), (1536, 576), (576, 1536), (576, 49152))]


@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_real_shapes_have_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, outputs = shape
    if dtype == torch.bfloat16:
        settle_bfloat16_kernels()
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            outputs //= 8  # without a matrix kernel torch takes 15 s, and sums every column alike
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)

    def take(name: str, rows: slice) -> torch.Tensor:
        return weight[rows].clone()

    def ranks_of(size: int) -> list[Linear]:
        parallels = [TensorParallel(8, rank) for rank in thread_ranks(size)]
        return [Linear(take, "one", outputs, parallel=parallel) for parallel in parallels]

    for rows in (1, 5, 16, 33):
        hidden = torch.randn(rows, inputs, generator=generator).to(dtype)
        (expected,) = (linear(hidden) for linear in ranks_of(1))
        torch.testing.assert_close(expected, torch.nn.functional.linear(hidden, weight), rtol=1e-2, atol=1.0)
        for size in (2, 4, 8):
            for got in at_once([partial(linear, hidden) for linear in ranks_of(size)]):
                assert torch.equal(got, expected)


@dataclass(frozen=True)
class Counted:
    """A tensor that counts the values that are read of it."""

    tensor: Tensor
    read: dict[str, int]
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def float32(self) -> np.ndarray:
        values = self.tensor.float32()
        self.read[self.name] = self.read.get(self.name, 0) + values.size
        return values

    def take_rows(self, part: slice) -> Counted:
        return Counted(self.tensor.take_rows(part), self.read, self.name)


@pytest.mark.parametrize("size", [2, 8])
def test_a_rank_reads_its_own_share_of_every_matrix(checkpoints: dict[str, Checkpoint], size: int) -> None:
    checkpoint = checkpoints["mixtral"]
    total: dict[str, int] = {}
    for rank in thread_ranks(size):
        read: dict[str, int] = {}
        counted = {name: Counted(tensor, read, name) for name, tensor in checkpoint.tensors.items()}
        load_pieces(replace(checkpoint, tensors=counted), torch.device("cpu"), torch.float32, rank)
        for name, values in read.items():
            matrix = checkpoint.tensors[name].shape
            if len(matrix) == 2 and not name.endswith(".mlp.gate.weight"):  # every rank has the router
                assert values <= (matrix[0] // size + 1) * matrix[1]
                total[name] = total.get(name, 0) + values
    assert total == {name: int(np.prod(checkpoint.tensors[name].shape)) for name in total}
    assert len(total) > 30


@pytest.mark.real
def test_rows_of_a_gguf_file_are_those_of_the_whole_tensor() -> None:
    tensors = load_checkpoint(resolve(DEFAULT_MODEL)).tensors
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):  # the first two are reordered
        tensor = tensors[f"model.layers.3.{name}.weight"]
        rows = slice(tensor.shape[0] // 3, 2 * tensor.shape[0] // 3)
        part = tensor.take_rows(rows)
        assert part.shape == (rows.stop - rows.start, tensor.shape[1])
        np.testing.assert_array_equal(part.float32(), tensor.float32()[rows])


@pytest.mark.real
@pytest.mark.parametrize("dtype", repeated("float32", "bfloat16"))
def test_a_real_model_on_three_ranks(dtype: str) -> None:
    """smollm2-135m has 9 heads that share 3 KV heads: 3 ranks is all it can have."""
    checkpoint = load_checkpoint(resolve(DEFAULT_MODEL))

    def answers(backend: TorchBackend) -> list[np.ndarray]:
        (request,) = drive(backend, pages_each=6)
        given = [request.extend(list(range(100, 150)))]
        given.append(request.run(TREE_TOKENS, TREE_PARENTS))
        return [*given, *(request.extend([token]) for token in (3, 4, 5))]

    expected = answers(TorchBackend.load(checkpoint, dtype=dtype))
    with sharded(checkpoint, 3, dtype) as backend:
        assert_same_bits(answers(backend), expected)


def test_pools_are_released_on_every_rank(llama: Checkpoint) -> None:
    with sharded(llama, 2) as backend:
        expected = drive(backend, pages_each=6)[0].extend(PROMPT)
        for _ in range(3):  # a pool that was released is not found again
            assert_same_bits([drive(backend, pages_each=6)[0].extend(PROMPT)], [expected])


@pytest.mark.parametrize(
    ("kv_heads", "pieces"),
    [(1, 1), (2, 2), (3, 3), (8, 8), (9, 9), (10, 2), (12, 4), (16, 8), (32, 8), (40, 8)],
)
def test_the_pieces_of_a_model(kv_heads: int, pieces: int) -> None:
    assert count_pieces(kv_heads) == pieces


@pytest.mark.parametrize("size", [3, 5, 16])
def test_a_size_that_does_not_divide_the_heads_is_refused(llama: Checkpoint, size: int) -> None:
    with pytest.raises(ConfigError, match=r"16 heads that share 8 KV heads.*Use one of 1, 2, 4, 8\."):
        TorchBackend.load(llama, tensor_parallel_size=size)


@pytest.mark.real
def test_a_real_model_says_which_sizes_it_can_have() -> None:
    config = load_checkpoint(resolve(DEFAULT_MODEL)).config
    check_size(config, 3)
    with pytest.raises(ConfigError, match=r"9 heads that share 3 KV heads.*Use one of 1, 3\."):
        check_size(config, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer from 1 up, got 0"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be an integer from 1 up"),
        ({"tensor_parallel_size": 2, "backend": "cpu"}, "the cpu backend runs on one CPU.*backend='torch'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BackendOptions(**options)


def test_auto_chooses_the_backend_that_has_it() -> None:
    choice = BackendOptions(tensor_parallel_size=2, device="cpu").choice
    assert (choice.name, choice.device) == ("torch", "cpu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return


@pytest.mark.parametrize(
    ("device", "size", "message"),
    [
        ("cuda", 4, "tensor_parallel_size is 4, but torch sees 2 CUDA devices; use at most 2"),
        ("cuda:1", 2, "'cuda:1' is one GPU, but tensor_parallel_size is 2; choose device cuda"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_more_gpus_than_there_are_is_refused_before_loading(
    llama: Checkpoint, device: str, size: int, message: str
) -> None:
    nothing = replace(llama, tensors={}, source=Path("nowhere"))
    with pytest.raises(BackendError, match=message):
        TorchBackend.load(nothing, device=device, tensor_parallel_size=size)
