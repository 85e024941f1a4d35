"""The backend computes what the torch backend does, and a token's logits have the same bits in any pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from paceline.backends.torch.backend import TorchBackend
from paceline.core.forward import Choices, RequestStates, chain_batch
from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint
from paceline.models.registry import load_checkpoint
from paceline.models.transformer.experts import MixtureOfExperts
from tests.backends.driver import Driven, drive, run
from tests.large import repeated
from tests.tiny import save_checkpoint
from tests.tiny_families import FAMILIES, MORE_FAMILIES, TORCH_FAMILIES, VOCAB_SIZE, Family

PROMPT = np.random.default_rng(1).integers(0, VOCAB_SIZE, 20).tolist()
TREE_PARENTS = [-1, 0, 0, 1, 2]
TREE_TOKENS = [11, 22, 33, 44, 55]
OTHERS = (
    "gemma2",
    "gemma3",
    "olmo2",
    "olmo3",
    "granite",
    "exaone4",
    "smollm3",
    "glm4",
    "glm4-moe",
    "gpt-oss",
)
OTHERS += ("cohere2", "phi3-partial-rope", "deepseek-v2", "deepseek-v3", "ministral3")
OTHERS += ("gemma4", "gemma4-moe", "gemma4-unified", "llama4")
KNOWN: dict[str, Family] = FAMILIES | {name: (TORCH_FAMILIES | MORE_FAMILIES)[name] for name in OTHERS}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="interpreted, whole models take minutes")


def make(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    """A backend as `load` makes it, on a CPU too."""
    from paceline.backends.cuda.backend import CudaBackend
    from paceline.backends.cuda.weights.model_weights import load_weights

    def take(name: str) -> torch.Tensor:
        return torch.from_numpy(checkpoint.tensors[name].float32()).to(device=device, dtype=dtype)

    return CudaBackend(load_weights(checkpoint.config, take), max_rows=32)


def clear_prompt(checkpoint: Checkpoint, count: int = 3) -> list[int]:
    """The part of PROMPT in which experts are chosen most clearly: rounding to 16 bits chooses no others."""
    if checkpoint.config.moe is None:
        return PROMPT[:count]
    distances, route, backend = list[float](), MixtureOfExperts._route, TorchBackend.load(checkpoint)

    def observed(self: MixtureOfExperts, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(hidden).float().sort(-1, descending=True).values
        chosen = self.moe.experts_per_token
        distances.append(float((scores[:, chosen - 1] - scores[:, chosen]).min()))
        return route(self, hidden)

    def least(tokens: list[int]) -> float:
        distances.clear()
        with patch.object(MixtureOfExperts, "_route", observed):
            drive(backend, pages_each=1)[0].extend(tokens)
        return min(distances)

    parts = [PROMPT[start : start + count] for start in range(len(PROMPT) - count + 1)]
    return max(parts, key=least)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@needs_gpu
@pytest.mark.parametrize("family", KNOWN)
def test_prefill_tree_commit_and_decode_are_those_of_torch(
    family: str, folder: Path, device: torch.device, dtype: torch.dtype
) -> None:
    checkpoint = load_checkpoint(save_checkpoint(family, folder / family))
    ours = drive(make(checkpoint, device, dtype), pages_each=3)[0]
    theirs = drive(TorchBackend.load(checkpoint), pages_each=3)[0]

    def logits(request: Driven) -> np.ndarray:
        prefill = request.extend(PROMPT)
        tree = request.run(TREE_TOKENS, TREE_PARENTS)
        request.commit([0, 2, 4])
        return np.concatenate((prefill, tree, request.extend([5])))

    difference = np.abs(logits(ours) - logits(theirs))
    assert np.isfinite(difference).all()
    assert np.median(difference) < 0.05
    # in 16 bits, a near tie of attention may go the other way: in torch's bfloat16, too
    assert np.quantile(difference.max(1), 0.9) < 1.0


@pytest.mark.parametrize(
    "family",
    [
        *("gemma4", "nemotron-h", "cohere2-moe", "mistral4"),
        *repeated("gemma4-moe", "llama4", "falcon-h1", "flex-olmo"),
    ],
)
def test_layers_of_every_kind_are_those_of_torch(
    family: str, folder: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Short enough for the interpreter: different heads, norms of experts, chunks, one block, two mixers."""
    checkpoint = load_checkpoint(save_checkpoint(family, folder / f"{family}-short"))
    tokens = np.array(clear_prompt(checkpoint), np.int32)

    def logits(backend: Any) -> np.ndarray:
        states = None
        if backend.bytes_per_state:
            states = RequestStates(backend.make_states(1), np.zeros(1, np.int32))
        batch = chain_batch(backend.make_pool(1), [(tokens, 0, 0)], 1)
        return backend.forward(replace(batch, states=states)).logits.copy()

    ours, theirs = logits(make(checkpoint, device, dtype)), logits(TorchBackend.load(checkpoint))
    assert np.median(np.abs(ours - theirs)) < 0.05
    assert np.median(np.abs(ours - theirs).max(1)) < 0.5  # of one row, other experts may be nearly as good


@needs_gpu
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", *OTHERS])
def test_a_token_has_the_same_bits_in_any_pass(
    family: str, folder: Path, device: torch.device, dtype: torch.dtype
) -> None:
    checkpoint = load_checkpoint(save_checkpoint(family, folder / f"{family}-bits"))
    backend = make(checkpoint, device, dtype)
    whole, pieces, drafting = drive(backend, pages_each=3, count=3)
    expected = whole.extend(PROMPT)
    first = pieces.extend(PROMPT[:11])
    drafting.extend(PROMPT[:14])
    # the rest of the prompt as a chunk beside a draft whose second branch is the same text
    tokens = [PROMPT[14], 3, PROMPT[15], 4, PROMPT[16]]
    both = run([pieces.ask(PROMPT[11:]), drafting.ask(tokens, [-1, 0, 0, 1, 2])]).logits
    rest, drafted = both[: len(PROMPT) - 11], both[len(PROMPT) - 11 :]
    assert np.array_equal(np.concatenate((first, rest)), expected)
    assert np.array_equal(drafted[[0, 2, 4]], expected[14:17])


def test_the_last_layer_is_finished_for_rows_with_logits_alone(
    folder: Path, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pass of many rows; a row has the same bits then."""
    from paceline.backends.cuda.passes import host_passes

    checkpoint = load_checkpoint(save_checkpoint("llama", folder / "late"))
    asked: list[int] = []
    for_all = host_passes.finish_rows

    def finish(weights: Any, workspace: Any, chosen: torch.Tensor, *rest: Any) -> None:
        asked.append(len(chosen))
        for_all(weights, workspace, chosen, *rest)

    def logits() -> np.ndarray:
        (request,) = drive(make(checkpoint, device, dtype), pages_each=1)
        first = run([request.ask(PROMPT[:3])], logit_rows=[2, 1]).logits.copy()
        request.commit(range(3))
        return np.concatenate((first, run([request.ask([7])], logit_rows=[0]).logits))

    expected = logits()
    monkeypatch.setattr(host_passes, "finish_rows", finish)
    monkeypatch.setattr(host_passes, "LATE_ROWS", 3)
    assert np.array_equal(logits(), expected)
    assert set(asked) == {2}


@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_samples_what_the_host_would_sample_from_its_logits(
    temperature: float, folder: Path, device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.core.params import SamplingParams
    from paceline.core.sampling import SamplingState
    from paceline.verify.sampling import Sampler

    backend = make(load_checkpoint(save_checkpoint("llama", folder / f"choice{temperature}")), device, dtype)
    (request,) = drive(backend, pages_each=3)
    logits = request.run(PROMPT)
    rows, seed = np.arange(5, 20, dtype=np.int32), 2**63 + 9
    choices = Choices(rows, np.full(15, seed, dtype=np.uint64), np.full(15, temperature))
    output = run([request.ask(PROMPT)], logit_rows=[0, 2, 3], choices=choices)
    assert np.array_equal(output.logits, logits[[0, 2, 3]])
    state = SamplingState(SamplingParams(temperature=temperature), seed, (), ())
    expected = [Sampler(VOCAB_SIZE).sample(state, logits[row], int(row) + 1, 0) for row in rows]
    assert output.chosen is not None
    assert output.chosen.tolist() == expected


@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_loop_gives_the_tokens_of_single_passes(
    temperature: float, folder: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Three requests decode on the device. A pass and the host's sampler at a time give the same tokens."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop, make_requests
    from paceline.core.params import SamplingParams
    from paceline.core.sampling import SamplingState
    from paceline.verify.sampling import Sampler

    checkpoint = load_checkpoint(save_checkpoint("qwen2", folder / f"loop{temperature}"))
    backend = make(checkpoint, device, dtype)
    requests = drive(backend, pages_each=4, count=3)
    lengths, seeds, steps = [7, 20, 13], [5, 2**40 + 3, 11], 12
    state = make_requests(3, 64, backend.page_size, device)
    loop = DecodeLoop(backend.weights, requests[0].pool, state, 4, backend.page_size)  # type: ignore[arg-type]
    for slot, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        request.extend(PROMPT[: length - 1])
        state.pages[slot] = torch.from_numpy(request.pages)
        state.tokens[slot, :length] = torch.tensor(PROMPT[:length], dtype=torch.int32)
        state.lengths[slot] = length - 1
        state.seeds[slot], state.temperatures[slot] = seeds[slot], temperature
    loop.begin([0, 1, 2], rows=4)
    looped = []
    for _ in range(steps):
        loop.step(4)
        looped.append(loop.output[:3, 0].tolist())
    expected = []
    for request, length, seed in zip(requests, lengths, seeds, strict=True):
        state = SamplingState(SamplingParams(temperature=temperature), seed, (), ())
        tokens = list(PROMPT[:length])
        for step in range(steps):
            logits = request.extend([tokens[-1]])[0]
            tokens.append(Sampler(VOCAB_SIZE).sample(state, logits, len(tokens), step))
        expected.append(tokens[length:])
    assert np.array_equal(np.array(looped).T, expected)


@needs_gpu
def test_features_are_those_of_torch(folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    checkpoint = load_checkpoint(save_checkpoint("llama", folder / "features"))
    asked = {"logit_rows": [3], "feature_layers": (0, 2, 3)}
    ours = run([drive(make(checkpoint, device, dtype), pages_each=3)[0].ask(PROMPT)], **asked)  # type: ignore[arg-type]
    theirs = run([drive(TorchBackend.load(checkpoint), pages_each=3)[0].ask(PROMPT)], **asked)  # type: ignore[arg-type]
    assert ours.features is not None
    assert theirs.features is not None
    for got, expected in zip(np.split(ours.features, 3, 1), np.split(theirs.features, 3, 1), strict=True):
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.05  # 8 bits of mantissa


def test_a_workspace_takes_the_memory_that_was_counted_before(folder: Path) -> None:
    from paceline.backends.cuda.passes.workspace import Room, make_workspace, workspace_bytes
    from paceline.backends.cuda.weights.model_weights import load_weights

    checkpoint = load_checkpoint(save_checkpoint("llama", folder / "memory"))
    weights = load_weights(
        checkpoint.config, lambda name: torch.from_numpy(checkpoint.tensors[name].float32()).half()
    )
    workspace = make_workspace(weights, Room.of(16, 640))
    attention = workspace.attention
    tensors = [
        workspace.hidden,
        workspace.query,
        workspace.attention_output,
        workspace.activated,
        workspace.logits,
    ]
    tensors += [
        *vars(workspace.scratch).values(),
        attention.partial_acc,
        attention.partial_stats,
        attention.counters,
    ]
    for normed in (workspace.attention_input, workspace.feed_forward_input, workspace.selected):
        tensors += [normed.rows, normed.squares]
    assert workspace_bytes(weights, Room.of(16, 640)) == sum(tensor.nbytes for tensor in tensors)


def test_weights_are_read_as_they_are_stored(folder: Path) -> None:
    from paceline.backends.cuda.weights.loading import _stored

    checkpoint = load_checkpoint(save_checkpoint("qwen2", folder / "stored"))
    for name, tensor in checkpoint.tensors.items():
        assert np.array_equal(_stored(tensor).float().numpy(), tensor.float32()), name


def test_every_pass_has_its_bucket() -> None:
    from paceline.backends.cuda.passes.graphs import bucket, buckets

    assert buckets(300) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert buckets(1100)[8:] == [256, 384, 512, 768, 1024, 1100]
    assert {bucket(rows) for rows in range(1, 301)} == {bucket(rows) for rows in buckets(300)}


@needs_gpu
def test_after_it_is_prepared_passes_of_any_size_wait_for_nothing(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> None:
    backend = make(load_checkpoint(save_checkpoint("llama", folder / "prepared")), device, dtype)
    (request,) = drive(backend, pages_each=4)
    expected = request.run(PROMPT)
    backend.prepare(request.pool, 64, ())
    graphs = set(backend._passes.graphs._captured)
    assert np.array_equal(request.run(PROMPT), expected)
    for rows in (1, 3, 11, 20):
        request.run(PROMPT[:rows])
    assert set(backend._passes.graphs._captured) == graphs
    memory = backend.device_memory(4, 64)
    assert 0 < memory.free < memory.total
    assert memory.needed > 0


def test_the_copy_of_raw_logits_that_decode_loops_share_is_in_the_plan_of_memory(
    folder: Path, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda import backend as module

    backend = make(load_checkpoint(save_checkpoint("llama", folder / "counted")), device, dtype)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    monkeypatch.setattr(module, "workspace_bytes", lambda weights, room: room.rows)
    assert backend.device_memory(100, 64).needed == module.COUNTED_LOOPS * 100 + 4 * 100 * VOCAB_SIZE


def test_what_it_cannot_run_is_refused_with_a_way_out(folder: Path) -> None:
    from paceline.backends.cuda.backend import CudaBackend

    dense = load_checkpoint(save_checkpoint("llama", folder / "dense"))
    with pytest.raises(BackendError, match="choose one of bfloat16, float16"):
        CudaBackend.load(dense, dtype="float32")
    with pytest.raises(BackendError, match="choose backend='cpu'"):
        CudaBackend.load(dense, device="cuda:99")
