"""Ranks that share a model give every bit of one GPU: logits, features, keys, values and tokens."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.async_decoding import DeviceDraft, NgramLookup, SlotInits
from paceline.backends.torch.parallel.ranks import start_ranks
from paceline.core.forward import Choices
from paceline.core.params import SamplingParams
from paceline.core.request import SamplingNeeds
from paceline.core.token_masks import packed_ids
from paceline.errors import BackendLostError, ConfigError
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.heads.config import HeadConfig
from paceline.models.registry import load_checkpoint
from tests.backends.adapters import drive_with, random_adapters
from tests.backends.cuda.logical_ranks import LogicalRank, LogicalRanks, captured_together, driven
from tests.backends.cuda.test_bits import SHAPES
from tests.backends.driver import drive, run
from tests.backends.torch.sharded import save_sharded
from tests.large import REPEATS, repeated
from tests.models.heads.driver import random_checkpoint

on_gpu = torch.cuda.is_available()
ROPE = RopeConfig(500.0)
# sizes that 2 and 4 ranks do not share evenly; 4 ranks have 2 KV heads
TINY = ModelConfig("qwen2", 200, 144, 1, 4, 2, 16, 100, 1e-5, ROPE, 64, tie_embeddings=False, qkv_bias=True)
SMALL = replace(TINY, vocab_size=100, hidden_size=70, num_heads=2, intermediate_size=40, tie_embeddings=True)
HEAD = HeadConfig("eagle3", 200, 200, 144, 144, 2, 1, 16, 64, 1e-5, ROPE, 64, feature_layers=(0, 1))
PAGE_SIZE, PAGES, LONGEST, ROWS, LENGTH, SEED = 16, 3, 48, 2, 14, 2**40 + 3
STEPS = 3 if on_gpu else 1  # interpreted, a step takes seconds
Work = Callable[[Any], Any]


def random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, shard: Any = None, packing: str = "none"
) -> Any:
    """Random weights, or a rank's part of them."""
    from paceline.backends.cuda.weights.model_weights import load_weights, packing_for
    from paceline.backends.cuda.weights.shard import WHOLE

    shapes = dict(expected_tensors(config))

    def take(name: str, rows: slice = slice(None)) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shapes[name], generator=generator, device=device)
        values = 1 + 0.2 * noise if "norm" in name else 1.5 * noise * noise.shape[-1] ** -0.5
        is_packed = packing != "none" and name.endswith("_proj.weight")
        return values[rows].float() if is_packed else values[rows].to(dtype)

    return load_weights(config, take, packing_for(packing, lambda name: ""), shard=shard or WHOLE)


def assert_same_on_ranks(work: Work, size: int) -> None:
    """What `work` returns for a shard, arrays, is the same on one GPU and on every one of `size` ranks."""
    from paceline.backends.cuda.weights.shard import WHOLE, Shard

    expected = work(WHOLE)
    with captured_together():
        for rank, got in enumerate(LogicalRanks(size).run(lambda own: work(Shard(own)))):
            for name, values in expected.items():
                assert np.array_equal(got[name], values), f"{name} of rank {rank}"


def passes(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    rows: Sequence[int] = (),
    packing: str = "none",
    adapter: str = "",
) -> Work:
    """A tree whose tokens are sampled on the device, then a prefill chunk for each number of `rows`.

    With `adapter` the request has one of `random_adapters`, and two more without it and with another follow.
    """
    from paceline.backends.cuda.backend import CudaBackend
    from paceline.backends.cuda.weights.adapters import with_adapters

    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 512).tolist()
    choices = Choices(np.arange(5, dtype=np.int32), np.full(5, SEED, np.uint64), np.array([0, 0.5, 1, 1, 3]))
    layers = (0, config.num_layers)

    def work(shard: Any) -> dict[str, np.ndarray]:
        weights = random_weights(config, device, dtype, shard, packing)
        if adapter:
            weights = with_adapters(weights, random_adapters(config))
        backend = CudaBackend(weights, max_rows=max(16, 0, *rows))
        names = (adapter, "", "b") if adapter else ("",)
        request, *others = drive_with(backend, 2 + sum(rows) // PAGE_SIZE, names)
        asked = [request.ask(tokens[:5], [-1, 0, 0, 1, 2]), *(other.ask(tokens[5:8]) for other in others)]
        tree = run(asked, feature_layers=layers, choices=choices)
        assert tree.features is not None
        assert tree.chosen is not None
        results = {"tree": tree.logits, "features": tree.features, "chosen": tree.chosen}
        results = {name: values.copy() for name, values in results.items()}
        request.commit([0, 2, 4])
        return results | {f"{count} rows": request.extend(tokens[:count]) for count in rows}

    return work


def decoding(
    config: ModelConfig, head: HeadConfig, kind: str, device: torch.device, dtype: torch.dtype, needs: int = 0
) -> Work:
    """Steps of the decode loop, from random keys and values."""
    checkpoint = random_checkpoint(head) if "head" in kind else None

    def work(shard: Any) -> dict[str, np.ndarray]:
        from paceline.backends.cuda.decode.decode_loop import DecodeLoop, make_requests
        from paceline.backends.cuda.decode.draft_networks import HeadNetwork, ModelNetwork
        from paceline.backends.cuda.decode.draft_shape import chain_shape, tree_shape
        from paceline.backends.cuda.heads.head_weights import load_head_weights
        from paceline.backends.cuda.passes.kv_pool import Pool

        def pool(layers: int, first: int, heads: int, of: int) -> Pool:
            generator = torch.Generator().manual_seed(9)
            shape = (layers, PAGES * PAGE_SIZE, of, config.head_dim)
            stored = [torch.randn(shape, generator=generator) for _ in range(2)]
            keys, values = (one[:, :, first : first + heads].to(device, dtype) for one in stored)
            return Pool(PAGES, 0, keys.contiguous(), values.contiguous())

        weights = random_weights(config, device, dtype, shard)
        state = make_requests(2, LONGEST, PAGE_SIZE, device)
        state.pages[1] = torch.tensor([2, 0, 1])
        state.tokens[1] = torch.from_numpy(np.random.default_rng(3).integers(0, config.vocab_size, LONGEST))
        state.lengths[1], state.seeds[1], state.temperatures[1] = LENGTH, SEED, 1.0
        state.asks_logprobs[1] = 1
        shape = tree_shape(5, 2, 3) if "tree" in kind else chain_shape(2)
        draft: Any = None
        if checkpoint is not None:
            of_head = load_head_weights(checkpoint, weights)
            own = pool(1, 0, head.num_kv_heads, head.num_kv_heads)
            draft = HeadNetwork(of_head, own, (0, 1), shape, ROWS, LONGEST, PAGE_SIZE)
        elif "model" in kind:
            smaller = random_weights(replace(config, num_layers=1), device, dtype)
            own = pool(1, 0, config.num_kv_heads, config.num_kv_heads)
            draft = ModelNetwork(smaller, own, shape, ROWS, LONGEST, PAGE_SIZE, config.vocab_size)
        first = shard.head_rows(config)[1].start // config.head_dim
        target = pool(config.num_layers, first, shard.heads(config)[1], config.num_kv_heads)
        loop = DecodeLoop(weights, target, state, ROWS, PAGE_SIZE, draft)
        loop.begin([1], ROWS, torch.ones(1, 2 * config.hidden_size, device=device))
        if needs & SamplingNeeds.TOKEN_MASK:
            even = packed_ids(np.arange(0, config.vocab_size, 2), config.vocab_size)
            loop.masks.send(ROWS * loop.nodes, np.arange(loop.nodes, dtype=np.int32), [even] * loop.nodes)
        drafted = []
        for _ in range(STEPS):
            loop.step(ROWS, needs)
            drafted.append(loop.drafted(ROWS)[0].clone())
        values = {"tokens": state.tokens[1], "lengths": state.lengths, "drafted": torch.stack(drafted)}
        values["normed"] = loop._workspace.attention_input.rows[: loop.nodes, : config.hidden_size].float()
        if needs:
            values["logprobs"] = loop.logprobs[0]
        return {name: value.cpu().numpy() for name, value in values.items()}

    return work


@pytest.mark.parametrize("size", repeated(2, 4))
def test_passes_have_the_bits_of_one_gpu(size: int, device: torch.device, dtype: torch.dtype) -> None:
    assert_same_on_ranks(passes(TINY, device, dtype), size)


@pytest.mark.parametrize("size", repeated(2, 4))
def test_passes_with_adapters_have_the_bits_of_one_gpu(
    size: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Four ranks: two have the same KV head."""
    assert_same_on_ranks(passes(TINY, device, dtype, adapter="a"), size)


@pytest.mark.parametrize("kind", repeated("head tree", "model", "plain"))
def test_steps_have_the_bits_of_one_gpu(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """The head is whole on every rank, but reads the target's embedding and output matrix, which are not."""
    head = replace(HEAD, own_embedding=False, own_lm_head=False)
    assert_same_on_ranks(decoding(TINY, head, kind, device, dtype), 4 if kind == "plain" else 2)


def test_log_probabilities_masks_and_truncation_see_the_whole_vocabulary(
    device: torch.device, dtype: torch.dtype
) -> None:
    needs = int(SamplingNeeds.LOGPROBS | SamplingNeeds.TRUNCATION | SamplingNeeds.TOKEN_MASK)
    assert_same_on_ranks(decoding(SMALL, HEAD, "plain", device, dtype, needs), 2)


needs_gpu = pytest.mark.skipif(not on_gpu, reason="the sizes of real models")
ROW_COUNTS = (1, 2, 3, 7, 16, 17, 33, 80, 130)  # every kind of launch


@needs_gpu
def test_nccl_gathers_in_a_captured_graph(tmp_path: Path, device: torch.device) -> None:
    """One rank: NCCL refuses two on one GPU."""
    from paceline.backends.cuda.passes.graphs import Graphs
    from paceline.backends.torch.parallel.communicator import GroupCommunicator

    group = GroupCommunicator(0, [torch.device("cuda", 0)], str(tmp_path / "store"), 60)
    own = [torch.zeros(4, 64, dtype=torch.bfloat16, device=device), torch.zeros(4, 3, device=device)]
    whole = [part.new_empty((1, *part.shape)) for part in own]
    graphs = Graphs(device)
    for value in (1.0, 2.0, 3.0):  # the first pass captures, the others replay
        for part in own:
            part.fill_(value)
        graphs.run("gather", lambda: group.gather_into(whole, own))
        assert all(torch.equal(to[0], part) for to, part in zip(whole, own, strict=True))


@needs_gpu
@pytest.mark.parametrize("size", [2, 4, 8])
def test_an_8b_has_the_bits_of_one_gpu(size: int, device: torch.device) -> None:
    assert_same_on_ranks(passes(SHAPES["llama-3.1-8b"], device, torch.bfloat16, ROW_COUNTS), size)


@needs_gpu
@pytest.mark.parametrize(
    ("shape", "size", "packing"),
    [
        ("qwen2.5-1.5b", 2, "none"),
        ("qwen2.5-1.5b", 4, "none"),  # more ranks than KV heads
        ("smollm2-135m", 3, "none"),
        ("qwen3-0.6b", 8, "none"),
        ("llama-3.1-8b", 4, "fp8"),
        ("llama-3.1-8b", 2, "int8"),
        ("llama-3.1-8b", 2, "int4"),
    ],
)
def test_real_shapes_have_the_bits_of_one_gpu(
    shape: str, size: int, packing: str, device: torch.device
) -> None:
    assert_same_on_ranks(passes(SHAPES[shape], device, torch.bfloat16, ROW_COUNTS, packing), size)


@needs_gpu
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", ["plain", "head", "head tree", "model", "model tree"])
def test_an_8b_that_drafts_has_the_bits_of_one_gpu(size: int, kind: str, device: torch.device) -> None:
    config = SHAPES["llama-3.1-8b"]
    head = HeadConfig(
        "eagle3", 700, 700, 4096, 4096, 32, 8, 128, 8192, 1e-5, ROPE, 512, feature_layers=(0, 1)
    )
    assert_same_on_ranks(decoding(config, head, kind, device, torch.bfloat16), size)


def decode(backend: Any, adapter: str = "", allowed: Sequence[int] | None = None) -> list[int]:
    """The tokens after a prompt: by a pass, and by a decoder that looks drafts up, among these if given."""
    (request,) = drive_with(backend, 2, [adapter])
    choices = Choices(np.array([2], np.int32), np.array([SEED], np.uint64), np.array([0.7]))
    first = run([request.ask([5, 3, 9])], logit_rows=[], choices=choices).chosen
    assert first is not None
    decoder = backend.make_async_decoder(request.pool, 1, 32, ())
    request_state = SlotInits(
        slots=np.zeros(1, np.int32),
        tokens=np.array([[9, int(first[0])]], np.int32),
        lengths=np.array([3], np.int32),
        limits=np.array([20], np.int32),
        seeds=np.array([SEED], np.uint64),
        temperatures=np.array([0.7]),
        most_drafted=np.ones(1, np.int32),
        truncation=np.array([SamplingParams().truncation]),
        logprobs=np.zeros(1, np.bool_),
        masked=np.array([allowed is not None]),
        edits=[None],
        adapters=[adapter],
    )
    decoder.join(request_state)
    decoder.write_texts([0], [np.array([5, 3, 9, int(first[0])], np.int32)])
    decoder.launch([0], request.pages[None], DeviceDraft(1, look_up=NgramLookup(1, 2)))
    if allowed is not None:
        mask = packed_ids(np.array(allowed), backend.config.vocab_size)
        assert decoder.drafted().tokens[0, 0] == first[0]
        decoder.send_masks(np.arange(2, dtype=np.int32), [mask, mask])
    output = decoder.read()
    return [int(first[0]), *output.tokens[0, : int(output.counts[0])].tolist()]


def test_all_ranks_execute_the_decode_calls_of_rank_0(device: torch.device, dtype: torch.dtype) -> None:
    """Passes, a decoder and its drafts through the pipes of ranks, which are threads here.

    Of a request with an adapter: others have fewer kernels.
    """
    from paceline.backends.cuda.backend import CudaBackend
    from paceline.backends.cuda.weights.adapters import with_adapters
    from paceline.backends.cuda.weights.shard import WHOLE

    def load(shard: Any, ranks: Any) -> CudaBackend:
        weights = random_weights(SMALL, device, dtype, shard)
        return CudaBackend(with_adapters(weights, random_adapters(SMALL)), max_rows=4, ranks=ranks)

    expected = decode(load(WHOLE, None), "a")
    others = [token for token in range(SMALL.vocab_size) if token not in expected[1:]]
    masked = decode(load(WHOLE, None), "a", others)
    assert masked[1:] != expected[1:]
    with captured_together(), driven(2, load) as backend:
        assert decode(backend, "a") == expected
    with captured_together(), driven(2, load) as backend:
        assert decode(backend, "a", others) == masked


@REPEATS
@pytest.mark.skipif(on_gpu, reason="kernels are compiled for the GPU, not interpreted")
def test_processes_give_the_tokens_of_one_and_end_when_one_is_killed(tmp_path: Path) -> None:
    """With gloo between them, in Triton's interpreter."""
    from paceline.backends.cuda.backend import CudaBackend
    from paceline.backends.cuda.weights.shard import Shard

    checkpoint = load_checkpoint(save_sharded("qwen2", tmp_path))
    cpu, kind = torch.device("cpu"), ("float16", "none", 4)
    ranks, communicator = start_ranks(checkpoint, [cpu, cpu], *kind, backend="cuda")
    backend = CudaBackend.load_part(checkpoint, cpu, *kind, Shard(communicator), ranks)
    ranks.wait_for_answers()
    ranks.name(backend, 0)
    assert decode(backend) == decode(CudaBackend.load_part(checkpoint, cpu, *kind))
    (request,) = drive(backend, pages_each=2)
    (rank,) = ranks.processes
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(BackendLostError, match=rf"rank 1 \(process {rank}\) was killed by SIGKILL.*restart"):
        request.extend([1])
    backend.close()


def test_sizes_that_cannot_share_a_model_are_refused() -> None:
    from paceline.backends.cuda.weights.shard import Shard, check_size

    for size in (1, 2, 4):
        check_size(TINY, size)
    with pytest.raises(ConfigError, match=r"4 heads that share 2 KV heads.* Use one of 1, 2, 4\."):
        check_size(TINY, 3)
    with pytest.raises(ConfigError, match=r"Use one of 1, 3, 9\."):
        check_size(replace(TINY, num_heads=9, num_kv_heads=3), 2)
    odd = replace(TINY, norm="layer", attention_scale=0.5)
    check_size(odd, 1)
    with pytest.raises(ConfigError, match=r"has LayerNorm, a scaled attention, which .* --backend torch"):
        check_size(odd, 2)
    of_two = Shard(LogicalRank(0, LogicalRanks(2)))
    with pytest.raises(ConfigError, match=r"sizes \(248 and 100\) are padded.* Use --quantization none"):
        random_weights(replace(TINY, hidden_size=248), torch.device("cpu"), torch.float16, of_two, "int4")
