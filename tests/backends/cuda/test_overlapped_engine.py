"""On a GPU, overlapped passes give the same tokens as passes that run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import Drafter, DraftSampling, UnboundDrafter
from paceline.draft.heads.head_drafter import LoadedHead, PagedHeadDrafter
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.model.vocabulary import trimmed_vocabulary
from paceline.kv.cache import KVCache
from paceline.models.config import RopeConfig
from paceline.models.heads.config import BlockAttention, BlockConfig, HeadConfig
from tests.backends.cuda.test_backend import make, needs_gpu
from tests.engines import AnyDrafter, new_engine
from tests.large import LARGE
from tests.models.heads.driver import random_checkpoint
from tests.tiny import save_checkpoint
from tests.tiny_families import VOCAB_SIZE
from tests.toy import ToyTokenizer, drain

CHAIN, TREE = DraftPlan("drafter", 3), DraftPlan("drafter", 11, branching=4, depth=3)
BOTH = replace(TREE, drafter="ngram", otherwise=TREE, enough=0.5)  # a lookup replaces a tree's first path


@needs_gpu
@pytest.mark.parametrize(
    ("family", "temperature"),
    [
        ("llama", 0.0),
        ("llama", 1.0),
        ("qwen3-5", 1.0),
        ("lfm2", 0.0),
        ("granite-hybrid", 1.0),
        ("deepseek-v2", 0.0),
        ("deepseek-v3", 1.0),
        ("gemma4", 1.0),
        ("llama4", 0.0),
        ("nemotron-h", 1.0),
        ("falcon-h1", 0.0),
    ],
)
def test_an_engine_that_overlaps_passes_gives_the_tokens_of_one_that_does_not(
    family: str,
    temperature: float,
    tmp_path: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """More requests than slots, of all sampling options, plain, with a head or a draft model on the device
    and with host drafts; and each alone, sampled on the host."""
    from paceline.engine.admission import Limits
    from paceline.models.registry import load_checkpoint

    checkpoint = load_checkpoint(save_checkpoint(family, tmp_path / family))
    drafting = load_checkpoint(save_checkpoint("llama", tmp_path / "draft"))
    limits = Limits(VOCAB_SIZE, 96, 4, 32)

    def outputs(
        together: bool,
        on_device: bool,
        make_drafter: Callable[[Any], AnyDrafter] | None = None,
        plan: DraftPlan = CHAIN,
    ) -> list[tuple[list[int], object]]:
        backend = make(checkpoint, device, dtype)
        if not on_device:
            backend.make_async_decoder = lambda *rest: None  # type: ignore[method-assign]
        assert backend.drafts_on_device
        drafters: dict[str, AnyDrafter] = {}
        if make_drafter is not None:
            drafters = {"drafter": make_drafter(backend)}
        if plan.drafter == "ngram":
            drafters["ngram"] = NgramDrafter(NgramDrafter.Options(prompt_lookup_min=2))
        controller = FixedController(plan if drafters else PLAIN)
        engine = new_engine(
            backend, ToyTokenizer(), limits, num_pages=60, drafters=drafters, controller=controller
        )
        results = []
        for number in range(7):
            prompt = np.random.default_rng(number).integers(2, VOCAB_SIZE, 3 + 5 * number).tolist()
            options = SamplingParams(
                temperature=temperature,
                top_k=5 * (number % 3),
                top_p=1.0 if number % 2 else 0.9,
                seed=number,
                max_tokens=20 + number,
                **EXTRA_OPTIONS[number % len(EXTRA_OPTIONS)],  # type: ignore[arg-type]
            )
            results.append(engine.add_request(prompt, options)[0])
            if not together:
                drain(engine, scribble=False)
        drain(engine, scribble=False)
        for request in results:
            assert request.error is None
            assert not request.failed_drafters
            assert bool(request.speculative.num_spec_steps) == bool(drafters)
        return [(request.output_token_ids, request.logprobs) for request in results]

    expected = outputs(False, False)
    assert outputs(True, True) == expected
    assert outputs(True, True, random_head) == expected
    assert outputs(True, True, random_head, TREE) == expected
    assert outputs(True, True, random_head, BOTH) == expected
    assert outputs(True, True, random_block_head) == expected
    assert outputs(True, True, random_block_head, TREE) == expected
    assert outputs(True, True, lambda backend: random_head(backend, mask_token_id=7)) == expected
    assert outputs(True, True, lambda backend: draft_model(make(drafting, device, dtype))) == expected
    assert outputs(True, True, lambda backend: Copies()) == expected


@pytest.mark.skipif(not LARGE and not torch.cuda.is_available(), reason="interpreted it takes minutes")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_that_name_other_drafts_share_passes_or_decode_beside_them(
    temperature: float, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Beside a chain of a head: drafts of the host, a tree, a lookup, a shorter chain, none."""
    from paceline.engine.admission import Limits
    from paceline.models.registry import load_checkpoint

    checkpoint, tokens = load_checkpoint(save_checkpoint("llama", tmp_path / "llama")), 4
    tree = {"method": "drafter", "num_speculative_tokens": TREE.budget, "branching": TREE.branching}
    named: list[Any] = [None, None, None, {"method": "copies", "num_speculative_tokens": 2}]
    if torch.cuda.is_available():  # else interpreted, which is slow
        named += [None, tree, None, {"method": "drafter", "num_speculative_tokens": 1}, "off", None]
        named += [{"method": "ngram", "num_speculative_tokens": 3}, None]
        tokens = 40

    def answers(together: bool) -> tuple[list[object], int]:
        """What each request got, and the passes on the device."""
        backend = make(checkpoint, device, dtype)
        if not together:
            backend.make_async_decoder = lambda *rest: None  # type: ignore[method-assign]
        ngram: Drafter = NgramDrafter(NgramDrafter.Options(prompt_lookup_min=1))
        engine = new_engine(
            backend,
            ToyTokenizer(),
            Limits(VOCAB_SIZE, 96, len(named) if together else 1, 32),
            num_pages=80,
            drafters={"drafter": random_head(backend), "copies": Copies(), "ngram": ngram}
            if together
            else {},
            controller=FixedController(CHAIN if together else PLAIN),
            plans={"drafter": TREE, "copies": DraftPlan("copies", 3), "ngram": DraftPlan("ngram", 3)},
        )
        added, overlapped = [], 0
        for number, speculative in enumerate(named):
            prompt = [*np.random.default_rng(number).integers(2, VOCAB_SIZE, 3 + number).tolist(), 5, 6, 5]
            options: dict[str, Any] = {"max_tokens": tokens + number, "seed": number, "ignore_eos": True}
            asked = speculative if together else None
            params = SamplingParams(temperature=temperature, speculative=asked, **options)
            added += engine.add_request(prompt, params)
        while engine.has_unfinished:
            engine.step()
            overlapped += engine.stats.overlapped
        assert not any(request.error or request.failed_drafters for request in added)
        if together:
            assert added[3].speculative.drafters.keys() == {"copies"}
            assert added[0].speculative.drafters.keys() == {"drafter"}
        return [request.output_token_ids for request in added], overlapped

    expected, _ = answers(together=False)
    found, overlapped = answers(together=True)
    assert found == expected
    assert overlapped > 0


@needs_gpu
@pytest.mark.parametrize(("temperature", "plan"), [(0.0, CHAIN), (1.0, CHAIN), (0.0, TREE), (1.0, TREE)])
def test_a_head_replaced_while_passes_overlap_changes_no_token_and_drafts_as_if_it_had_been_there(
    temperature: float, plan: DraftPlan, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Weights change where captured graphs read them, and keys and values of running requests follow."""
    from paceline.engine.admission import Limits
    from paceline.models.registry import load_checkpoint

    checkpoint = load_checkpoint(save_checkpoint("llama", tmp_path / "llama"))
    prompts = [np.random.default_rng(n).integers(2, VOCAB_SIZE, 3 + 9 * n).tolist() for n in range(3)]

    def answers(heads: Sequence[int], every: int) -> tuple[list[list[int]], int]:
        """The tokens, and the accepted ones, with the random heads of these seeds in turns."""
        backend = make(checkpoint, device, dtype)
        drafters = [random_head(backend, seed) for seed in heads]
        engine = new_engine(
            backend,
            ToyTokenizer(),
            Limits(VOCAB_SIZE, 96, 4, 32),
            num_pages=60,
            drafters={"drafter": random_head(backend, heads[0])} if heads else {},
            controller=FixedController(plan if heads else PLAIN),
        )
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)
        added, steps = [engine.add_request(prompt, params)[0] for prompt in prompts], 0
        while engine.has_unfinished:
            engine.step()
            steps += 1
            if every and steps % every == 0:
                engine.replace_head("drafter", drafters[steps // every % len(drafters)])
        assert not any(request.error or request.failed_drafters for request in added)
        accepted = sum(request.speculative.num_accepted_draft_tokens for request in added)
        return [request.output_token_ids for request in added], accepted

    plain, _ = answers((), 0)
    assert answers((3, 4), 3)[0] == plain
    once, other = answers((4,), 0), answers((5,), 0)
    assert answers((4,), 5) == once  # the same head again: every draft is the same
    assert other[0] == once[0] == plain
    assert once[1] > 0 or plan is CHAIN  # a random head is rarely right


EXTRA_OPTIONS: list[dict[str, object]] = [
    {"ignore_eos": True},
    {"logprobs": 3, "ignore_eos": True},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "ignore_eos": True},
    {"logit_bias": {9: 3.0, 11: -2.0}, "min_tokens": 12},
    {"logprobs": 1, "logit_bias": {9: 3.0, 11: -2.0}, "frequency_penalty": 0.3, "min_tokens": 12},
]


class Copies(Drafter):
    """Drafts what came three tokens ago, by the host, while passes run."""

    name = "eagle3"

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        return DraftTrees.chains(
            [request.token_ids[-3:][: plan.budget] for request, plan in zip(requests, plans, strict=True)]
        )


def draft_model(backend):  # type: ignore[no-untyped-def]
    """A drafter with this draft model."""
    from paceline.draft.model.draft_cache import SharedPages
    from paceline.draft.model.draft_model import DraftModelDrafter

    vocabulary, make_cache = trimmed_vocabulary(None, VOCAB_SIZE), partial(SharedPages, longest=96)

    def bind(kv: KVCache) -> DraftModelDrafter:
        drafter = DraftModelDrafter(
            backend,
            vocabulary,
            make_cache(kv, backend),
            vocab_size=VOCAB_SIZE,
            sampling=DraftSampling.COUPLED,
            device_longest=96,
        )
        assert drafter.device is drafter
        return drafter

    return UnboundDrafter("draft_model", bind)


def random_head(backend, seed: int = 3, mask_token_id: int | None = None):  # type: ignore[no-untyped-def]
    """A drafter with a random head for a tiny model, of two layers if it drafts by masks (P-EAGLE)."""
    from paceline.backends.cuda.heads.head_runner import CudaHeadRunner
    from paceline.backends.cuda.heads.head_weights import load_head_weights
    from paceline.draft.heads.eagle import Eagle3Drafter
    from paceline.draft.heads.head_drafter import HeadShape, Mask

    size = backend.config.hidden_size
    rope = RopeConfig(500.0)
    config = HeadConfig("eagle3", VOCAB_SIZE, 90, size, size, 6, 2, 16, 80, 1e-5, rope, 128, (0, 1, 2))
    mask = None
    if mask_token_id is not None:
        config = replace(config, num_layers=2, mask_token_id=mask_token_id)
        mask = Mask(mask_token_id, np.ones(3 * size, np.float32))
    head = random_checkpoint(config, seed)
    runner = CudaHeadRunner(load_head_weights(head, backend.weights), max_rows=32)
    shape = HeadShape((0, 1, 2), 3 * size, trimmed_vocabulary(head.draft_ids, VOCAB_SIZE), 128, mask=mask)
    return on_device(Eagle3Drafter, LoadedHead(runner, shape, DraftSampling.COUPLED))


def random_block_head(backend):  # type: ignore[no-untyped-def]
    """A drafter with a random DSpark head for a tiny model; six blocks fit into a pass."""
    from paceline.backends.cuda.heads.block_runner import CudaBlockRunner
    from paceline.backends.cuda.heads.block_weights import load_block_weights
    from paceline.draft.heads.block import DSparkDrafter
    from paceline.draft.heads.head_drafter import HeadShape

    size, rope = backend.config.hidden_size, RopeConfig(500.0)
    block = BlockConfig(5, 7, (BlockAttention(),) * 2, sample_from_anchor=True, markov_rank=9)
    sizes = (VOCAB_SIZE, 90, size, size, 6, 2, 16, 80, 1e-5, rope, 128, (0, 1, 2))
    head = random_checkpoint(HeadConfig("dspark", *sizes, qk_norm=True, block=block))
    runner = CudaBlockRunner(load_block_weights(head, backend.weights), max_rows=32)
    vocabulary = trimmed_vocabulary(head.draft_ids, VOCAB_SIZE)
    shape = HeadShape((0, 1, 2), 3 * size, vocabulary, 128, block=block, layers=2, kv_heads=2, head_dim=16)
    return on_device(DSparkDrafter, LoadedHead(runner, shape, DraftSampling.COUPLED))


def on_device(kind: type[PagedHeadDrafter[Any]], head: LoadedHead[Any]) -> UnboundDrafter:
    """The drafter with this head, which must draft on the device."""
    unbound = kind.unbound(head)

    def bind(kv: KVCache) -> Drafter:
        drafter = unbound.bind(kv)
        assert drafter.device is drafter
        return drafter

    return replace(unbound, bind=bind)
