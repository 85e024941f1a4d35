"""A step that drafts on the device gives the tokens of plain decoding, whatever drafts, in whatever shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.async_decoding import NgramLookup
from paceline.backends.head_chains import coupled_choice, likeliest
from paceline.backends.heads import HeadBatch
from paceline.core.forward import ForwardBatch, chain_parents
from paceline.core.params import SamplingParams
from paceline.core.request import SamplingNeeds
from paceline.core.sampling import SamplingState
from paceline.core.token_masks import packed_id, packed_ids
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.heads.config import HeadConfig
from paceline.verify.logprobs import logprobs_of_fields, token_logprobs
from paceline.verify.sampling import Sampler
from tests.large import repeated
from tests.models.heads.driver import random_checkpoint

PAGE_SIZE, PAGES, LONGEST, ROWS = 16, 3, 48, 2
CONFIG = ModelConfig("llama", 60, 32, 1, 2, 1, 16, 64, 1e-5, RopeConfig(500.0), 64, tie_embeddings=True)
HEAD = HeadConfig("eagle3", 60, 40, 32, 32, 2, 1, 16, 64, 1e-5, RopeConfig(500.0), 64, feature_layers=(0, 1))
LENGTH, SEED = 14, 2**40 + 3  # its second page is soon needed
on_gpu = torch.cuda.is_available()
KINDS = [("tree", 1.0)]  # interpreted, a step takes a second
if on_gpu:
    KINDS = [
        (kind, temperature) for kind in ("model", "tree", "head", "head tree") for temperature in (0.0, 1.0)
    ]


def random_weights(
    device: torch.device, dtype: torch.dtype, wrong: float = 0.0, config: ModelConfig = CONFIG
) -> Any:
    """The target, or with `wrong` a draft that sometimes disagrees with it."""
    from paceline.backends.cuda.weights.model_weights import load_weights

    shapes, generator = dict(expected_tensors(config)), torch.Generator().manual_seed(5)

    def take(name: str) -> torch.Tensor:
        noise, other = (torch.randn(shapes[name], generator=generator) for _ in range(2))
        values = 1 + 0.2 * noise if "norm" in name else 0.3 * (noise + wrong * other)
        return values.to(device=device, dtype=dtype)

    return load_weights(config, take)


class Case:
    """A request beside a row of padding. Its prompt's keys and values are random."""

    def __init__(self, temperature: float, device: torch.device, dtype: torch.dtype) -> None:
        from paceline.backends.cuda.decode.decode_loop import make_requests

        self.device, self.dtype = device, dtype
        self.weights = random_weights(device, dtype)
        self.state = state = make_requests(2, LONGEST, PAGE_SIZE, device)
        state.pages[1] = torch.tensor([2, 0, 1])
        state.tokens[1] = torch.from_numpy(np.random.default_rng(3).integers(0, 60, LONGEST))
        state.lengths[1], state.seeds[1], state.temperatures[1] = LENGTH, SEED, temperature

    def pool(self) -> Any:
        from paceline.backends.cuda.passes.kv_pool import Pool

        generator = torch.Generator().manual_seed(9)
        shape = (1, PAGES * PAGE_SIZE, 1, 16)
        keys, values = (torch.randn(shape, generator=generator).to(self.device, self.dtype) for _ in range(2))
        return Pool(PAGES, 0, keys, values)

    def draft(self, kind: str) -> Any:
        from paceline.backends.cuda.decode.draft_networks import HeadNetwork, ModelNetwork
        from paceline.backends.cuda.decode.draft_shape import chain_shape, tree_shape
        from paceline.backends.cuda.heads.head_weights import load_head_weights

        shape = tree_shape(5, 2, 3) if "tree" in kind else chain_shape(2)
        room = (shape, ROWS, LONGEST, PAGE_SIZE)
        if "head" in kind:
            head = load_head_weights(random_checkpoint(HEAD), self.weights)
            return HeadNetwork(head, self.pool(), (0, 1), *room)
        return ModelNetwork(random_weights(self.device, self.dtype, 0.02), self.pool(), *room, 60)

    def run(self, draft: Any, least: int, given: Any = None, guess: Any = 0) -> tuple[list[int], int]:
        """At least `least` tokens of the request if it does not end before, and the number of steps."""
        from paceline.backends.cuda.decode.decode_loop import DecodeLoop

        loop = DecodeLoop(self.weights, self.pool(), self.state, ROWS, PAGE_SIZE, draft, given)
        loop.begin([1], ROWS, torch.ones(1, 64, device=self.device))
        if given is not None:
            loop.drafted(ROWS)[0, 1:] = guess
        output: list[int] = []
        steps = 0
        while steps < least:
            loop.step(ROWS)
            steps += 1
            count, padding = loop.counts.tolist()
            assert padding == 0
            output += loop.output[0, :count].tolist()
            if len(output) >= least or not count:
                break
        return output, steps


def plain_logits(weights: Any, pool: Any, state: Any, length: int) -> np.ndarray:
    """The logits of the token at index `length`, by plain steps over a fresh pool with the same tokens."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop, make_requests

    fresh = make_requests(2, LONGEST, PAGE_SIZE, state.tokens.device)
    for name in ("tokens", "pages", "seeds", "temperatures"):
        getattr(fresh, name).copy_(getattr(state, name))
    fresh.lengths[1] = LENGTH
    loop = DecodeLoop(weights, pool, fresh, ROWS, PAGE_SIZE)
    loop.begin([1], ROWS)
    for index in range(LENGTH, length + 1):
        fresh.tokens[1, index] = state.tokens[1, index]  # not what plain decoding chooses
        fresh.lengths[1] = index
        loop.begin([1], ROWS)
        loop.step(ROWS)
    return loop._workspace.logits[0, :60].float().cpu().numpy()


@pytest.mark.parametrize(("kind", "temperature"), KINDS)
def test_drafting_on_the_device_leaves_the_tokens_as_they_are(
    kind: str, temperature: float, device: torch.device, dtype: torch.dtype
) -> None:
    plain, _ = Case(temperature, device, dtype).run(None, 3)
    case = Case(temperature, device, dtype)
    drafted, steps = case.run(case.draft(kind), 3)
    assert drafted[:3] == plain
    assert steps < 3 or "head" in kind  # drafts were accepted; a random head drafts nothing right
    assert case.state.lengths.tolist() == [0, LENGTH + len(drafted)]
    assert case.state.tokens[1, LENGTH + 1 : LENGTH + 4].tolist() == plain


def test_a_step_accepts_no_more_drafted_tokens_than_a_request_takes(
    device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.decode.draft_shape import chain_shape

    plain, _ = Case(0.0, device, dtype).run(None, 3)
    guess = torch.tensor(plain[:2], dtype=torch.int32, device=device)
    for takes in (2, 1, 0):
        case = Case(0.0, device, dtype)
        case.state.most_drafted[1] = takes
        assert case.run(None, 1, chain_shape(2), guess=guess)[0] == plain[: 1 + takes]


def test_features_are_the_hidden_states_ahead_of_layers_and_behind_the_last(
    device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop

    case = Case(0.0, device, dtype)
    loop = DecodeLoop(case.weights, case.pool(), case.state, ROWS, PAGE_SIZE, feature_layers=(1, 0))
    loop.begin([1], ROWS)
    loop.step(ROWS)
    assert loop.features is not None
    last, first = loop.features[0].view(2, 32)
    table = case.weights.embedding.weight.transpose(1, 2).flatten(2).flatten(0, 1)  # as it was before tiling
    assert torch.equal(first, table[case.state.tokens[1, LENGTH], :32].float())
    assert torch.equal(last, loop._workspace.hidden[0, :32])
    assert not torch.equal(first, last)


def test_a_head_begins_with_the_features_that_its_pool_keeps(
    device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.heads.head import HeadPool

    case = Case(0.0, device, dtype)
    draft, pool = case.draft("head"), case.pool()
    features = torch.arange(PAGES * PAGE_SIZE, device=device)[:, None].repeat(1, 64).to(dtype)
    parts = torch.arange(2, dtype=torch.int32, device=device)
    kept = HeadPool(PAGES, 0, draft.pool.keys, draft.pool.values, features, parts)
    loop = DecodeLoop(case.weights, pool, case.state, ROWS, PAGE_SIZE, draft, kept=kept)
    loop.begin([1], ROWS)
    page = int(case.state.pages[1, (LENGTH - 1) // PAGE_SIZE])
    assert draft.features[0].unique().tolist() == [page * PAGE_SIZE + (LENGTH - 1) % PAGE_SIZE]


def test_an_accepted_path_of_a_tree_keeps_its_features_and_log_probabilities(
    device: torch.device, dtype: torch.dtype
) -> None:
    """The second of two drafted siblings is right, so its row is not next to the root's."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.decode.draft_shape import tree_shape
    from paceline.backends.cuda.heads.head import HeadPool

    (right,), _ = Case(0.0, device, dtype).run(None, 1)
    case = Case(0.0, device, dtype)
    case.state.asks_logprobs[1] = 1
    features = torch.zeros(PAGES * PAGE_SIZE, 64, device=device, dtype=dtype)
    parts = torch.arange(2, dtype=torch.int32, device=device)
    kept = HeadPool(PAGES, 0, torch.empty(0), torch.empty(0), features, parts)
    target = case.weights, case.pool(), case.state, ROWS, PAGE_SIZE
    loop = DecodeLoop(*target, given=tree_shape(3, 2, 1), feature_layers=(1, 0), kept=kept)
    loop.begin([1], ROWS)
    loop.drafted(ROWS)[0, 1:] = torch.tensor([(right + 1) % 60, right])
    loop.step(ROWS, int(SamplingNeeds.LOGPROBS))
    assert loop.counts.tolist() == [2, 0]
    assert loop.accepted[0].tolist() == [0, 2]
    assert loop.results[4:8].tolist() == [*loop.accepted.flatten().tolist()]
    assert loop.output[0, 0] == right
    indices = torch.tensor([LENGTH, LENGTH + 1], device=device)
    slots = case.state.pages[1, indices // PAGE_SIZE] * PAGE_SIZE + indices % PAGE_SIZE
    assert loop.features is not None
    assert torch.equal(features[slots.long()], loop.features[[0, 2]].to(dtype))
    assert not torch.equal(loop.features[1], loop.features[2])
    assert torch.equal(loop.path_logprobs(1)[0], loop.logprobs[0, [0, 2]])


@pytest.mark.parametrize("is_found", [True, *repeated(False)])
def test_a_head_catches_up_with_the_features_of_accepted_tokens(
    is_found: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """One drafted token is made right, so two tokens are new. The next is what a runner drafts after them,
    also if the right one was not the head's but looked up."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.decode.draft_networks import HeadNetwork
    from paceline.backends.cuda.decode.draft_shape import chain_shape
    from paceline.backends.cuda.heads.head_runner import CudaHeadRunner
    from paceline.backends.cuda.heads.head_weights import load_head_weights

    (right,), _ = Case(0.0, device, dtype).run(None, 1)
    case = Case(0.0, device, dtype)
    head = load_head_weights(random_checkpoint(HEAD), case.weights)
    draft = HeadNetwork(head, case.pool(), (0, 1), chain_shape(1), ROWS, LONGEST, PAGE_SIZE)
    look_up = NgramLookup(2, 2) if is_found else None
    loop = DecodeLoop(case.weights, case.pool(), case.state, ROWS, PAGE_SIZE, draft, look_up=look_up)
    guess = (right + 1) % 60 if is_found else right
    draft.target_ids = torch.full((40,), guess, dtype=torch.int32, device=device)
    end = case.state.tokens[1, LENGTH - 1 : LENGTH + 1].tolist()
    case.state.tokens[1, 2:5] = torch.tensor([*end, right])  # looked up; no pass reads it
    loop.begin([1], ROWS, torch.ones(1, 64, device=device))
    loop.step(ROWS)
    assert loop.counts.tolist() == [2, 0]

    new = case.state.tokens[1, LENGTH + 1 : LENGTH + 3].tolist()
    features = draft.features[:2].clone()  # type: ignore[index]
    runner = CudaHeadRunner(head, max_rows=4)
    rows = ForwardBatch(
        tokens=np.array(new, np.int32),
        positions=np.array([LENGTH, LENGTH + 1], np.int32),
        parents=chain_parents([2]),
        row_offsets=np.array([0, 2], np.int32),
        context_lengths=np.array([LENGTH + 1], np.int32),
        page_tables=case.state.pages[1:].cpu().numpy(),
        logit_rows=np.array([1], np.int32),
        pool=draft.pool,
    )
    expected = runner.run_chains(HeadBatch(rows, features.cpu().numpy(), True), [1], 0.0)
    draft.target_ids.copy_(head.target_ids)
    loop.step(ROWS)
    assert loop.drafted(ROWS)[0, 1] == expected.tokens[0, 0]


@pytest.mark.parametrize("temperature", [1.0, *repeated(0.0)])
def test_masks_in_a_step_draft_all_levels_after_the_accepted_tokens(
    temperature: float, device: torch.device, dtype: torch.dtype
) -> None:
    """The first drafted token of a P-EAGLE head is made right. The next ones are those that a runner drafts
    by one pass over the new tokens and masks."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.decode.draft_shape import chain_shape
    from paceline.backends.cuda.heads.head_runner import CudaHeadRunner
    from paceline.backends.cuda.heads.head_weights import load_head_weights

    (right, *_), _ = Case(temperature, device, dtype).run(None, 1)
    case = Case(temperature, device, dtype)
    config = replace(HEAD, num_layers=2, mask_token_id=59)
    head = load_head_weights(random_checkpoint(config), case.weights)
    assert head.mask is not None
    assert head.target_ids is not None
    runner = CudaHeadRunner(head, max_rows=8)
    draft = runner.network(runner.make_pool(PAGES), (0, 1), chain_shape(3), ROWS, LONGEST, PAGE_SIZE)
    loop = DecodeLoop(case.weights, case.pool(), case.state, ROWS, PAGE_SIZE, draft)
    assert len(loop.loop_rows.plan.passes) == 3  # two of them of the head
    draft.target_ids = torch.full((40,), right, dtype=torch.int32, device=device)
    loop.begin([1], ROWS, torch.ones(1, 64, device=device))
    loop.step(ROWS)
    count, ids = int(loop.counts[0]), head.target_ids.cpu().numpy()
    assert count > 1

    assert draft.features is not None
    states = torch.cat((draft.features[:count], *[head.mask.float()] * 2)).cpu().numpy()
    end = LENGTH + 1 + count
    rows = ForwardBatch(
        tokens=np.array([*case.state.tokens[1, LENGTH + 1 : end].tolist(), 59, 59], np.int32),
        positions=np.arange(LENGTH, end + 1, dtype=np.int32),
        parents=chain_parents([count + 2]),
        row_offsets=np.array([0, count + 2], np.int32),
        context_lengths=np.array([LENGTH + 1], np.int32),
        page_tables=case.state.pages[1:].cpu().numpy(),
        logit_rows=np.arange(count - 1, count + 2, dtype=np.int32),
        pool=draft.pool,
    )
    expected = []
    for level, logits in enumerate(runner.run(HeadBatch(rows, states, True)).logits):
        best, _ = likeliest(logits)
        if temperature:
            best, _ = coupled_choice(logits, ids, temperature, (np.uint64(SEED), np.uint64(end + level)))
        expected.append(ids[best])
    draft.target_ids.copy_(head.target_ids)
    loop.step(ROWS)
    assert loop.drafted(ROWS)[0, 1:].tolist() == expected


@pytest.mark.parametrize("computed", [2, LENGTH])
def test_a_head_in_a_cascade_catches_up_on_looked_up_tokens(
    computed: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Which of them were looked up is not known, and of those it has no keys and values."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.heads.head import HeadPool

    case = Case(0.0, device, dtype)
    case.state.lengths[1] = computed
    draft = case.draft("head")
    features = torch.arange(PAGES * PAGE_SIZE, device=device)[:, None].repeat(1, 64).to(dtype)
    parts = torch.arange(2, dtype=torch.int32, device=device)
    kept = HeadPool(PAGES, 0, draft.pool.keys, draft.pool.values, features, parts)
    target = case.weights, case.pool(), case.state, ROWS, PAGE_SIZE
    loop = DecodeLoop(*target, draft, kept=kept, look_up=NgramLookup(2, 2))
    loop.begin([1], ROWS)
    count = min(computed, draft.catch_up_rows)
    slots = [int(case.state.pages[1, 0]) * PAGE_SIZE + computed - count + row for row in range(count)]
    assert draft.features[:count, 0].tolist() == slots
    catches_up = loop.loop_rows.pass_rows(1, ROWS)
    tokens = case.state.tokens[1, computed - count + 1 : computed + 1]
    assert catches_up.tokens[:count].tolist() == tokens.tolist()
    assert catches_up.sources[:count].tolist() == list(range(count))
    assert catches_up.tables.positions[:count].tolist() == list(range(computed - count + 1, computed + 1))


@pytest.mark.parametrize("value_size", [16, 0])
def test_accepted_paths_are_moved_with_values_or_without(value_size: int, device: torch.device) -> None:
    """Latents have no values. What lies behind the empty ones must stay."""
    from paceline.backends.cuda.decode.decode_loop import make_requests
    from paceline.backends.cuda.kernels.accept import move_accepted

    state = make_requests(2, LONGEST, PAGE_SIZE, device)
    state.pages[1] = torch.tensor([2, 0, 1])
    state.lengths[1] = LENGTH + 3  # of these three, the nodes 0, 2 and 3 of a tree
    counts, accepted = torch.tensor([3], device=device), torch.tensor([[0, 2, 3]], device=device)
    memory = torch.arange(2 * 2 * PAGES * PAGE_SIZE * 16, device=device, dtype=torch.float32)
    keys, rest = memory.view(2, 2, PAGES * PAGE_SIZE, 1, 16).clone()
    values = rest[..., :value_size]
    slot = torch.tensor([1], device=device)
    move_accepted(keys, values, slot, state, state.pages, counts.int(), accepted.int(), PAGE_SIZE)
    slots = [2 * PAGE_SIZE + LENGTH, 2 * PAGE_SIZE + LENGTH + 1, 0]  # of the indices LENGTH to LENGTH + 2
    sources = [slots[0], slots[2], 1]
    before_keys, before_rest = memory.view(2, 2, PAGES * PAGE_SIZE, 1, 16)
    assert torch.equal(keys[:, slots], before_keys[:, sources])
    assert torch.equal(rest[:, slots], before_rest[:, sources if value_size else slots])


def test_no_token_is_computed_at_the_limit_of_a_request(device: torch.device, dtype: torch.dtype) -> None:
    """One index is left: the root gives a token, which the host had drafted, and no more come."""
    from paceline.backends.cuda.decode.draft_shape import chain_shape

    plain, _ = Case(0.0, device, dtype).run(None, 1)
    case = Case(0.0, device, dtype)
    case.state.limits[1] = LENGTH + 1
    tokens, steps = case.run(None, 2, chain_shape(1), plain[0])
    assert (tokens, steps) == (plain, 2)
    assert case.state.lengths.tolist() == [0, LENGTH + 1]


def test_a_step_edits_logits_counts_its_tokens_and_gives_log_probabilities(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Two steps with a bias and penalties, and one without, beside what the host computes.

    The bias wins the first step. It loses the second, where the penalties of its token count.
    """
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.kernels.sampling.logit_edits import make_edit_state

    case = Case(0.0, device, dtype)
    text = case.state.tokens[1, : LENGTH + 1].tolist()
    penalties = {"repetition_penalty": 20.0, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    params = SamplingParams(temperature=0, logit_bias={7: 50.0}, **penalties)
    state, sampler = SamplingState(params, SEED, text[:-1], ()), Sampler(60)
    state.advance(text[-1])
    edits = make_edit_state(2, 60, device)
    edits.init_slot(1, state.logit_edits())
    edits.is_active[1] = case.state.asks_logprobs[1] = 1
    loop = DecodeLoop(case.weights, case.pool(), case.state, ROWS, PAGE_SIZE)
    loop.begin([1], ROWS)
    for step in range(2):
        loop.step(ROWS, int(SamplingNeeds.LOGIT_EDITS | SamplingNeeds.LOGPROBS), edits)
        raw = plain_logits(case.weights, case.pool(), case.state, LENGTH + step)
        token = int(loop.output[0, 0])
        assert token == sampler.sample(state, raw, LENGTH + 1 + step, 1 + step)
        assert raw.argmax() != 7
        assert (token == 7) == (step == 0)
        assert logprobs_of_fields(loop.logprobs[0, 0].tolist(), token, 3) == token_logprobs(raw, token, 3)
        state.advance(token)
        assert edits.history[1, token] & ~(1 << 30) == state.logit_edits().output_counts[-1]
    assert edits.history[0].sum() == 0
    loop.step(ROWS, int(SamplingNeeds.LOGPROBS), edits)
    raw = plain_logits(case.weights, case.pool(), case.state, LENGTH + 2)
    token = int(loop.output[0, 0])
    assert logprobs_of_fields(loop.logprobs[0, 0].tolist(), token, 3) == token_logprobs(raw, token, 3)


def test_a_step_with_masks_takes_what_they_allow_along_the_draft(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Three launches. The drafted token is what the mask of the root leaves, so the row below it counts. The
    log-probabilities are those of the logits without masks."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.decode.draft_shape import chain_shape

    case = Case(0.0, device, dtype)
    case.state.asks_logprobs[1] = 1
    loop = DecodeLoop(case.weights, case.pool(), case.state, ROWS, PAGE_SIZE, None, chain_shape(2))
    loop.begin([1], ROWS)
    loop.drafted(ROWS)[0, 1:] = torch.tensor([33, 58], device=device)
    loop.start_draft(ROWS)
    loop.start_logits(ROWS)
    raw = plain_logits(case.weights, case.pool(), case.state, LENGTH)
    assert raw.argmax() != 33
    least = int(raw.argmin())
    masks = [packed_id(33, 60), packed_ids(np.array([least, 58]), 60), packed_id(least, 60)]
    loop.masks.send(ROWS * 3, np.array([0, 1, 2], dtype=np.int32), masks)
    loop.finish(ROWS, int(SamplingNeeds.TOKEN_MASK | SamplingNeeds.LOGPROBS))
    tokens = loop.output[0, : loop.counts[0]].tolist()
    fields = loop.path_logprobs(ROWS)[0].tolist()
    case.state.tokens[1, LENGTH + 1] = 33
    second = plain_logits(case.weights, case.pool(), case.state, LENGTH + 1)
    expected = [33, 58 if second[58] > second[least] else least]
    assert tokens == ([*expected, least] if expected[1] == 58 else expected)
    for level, logits in enumerate((raw, second)):
        given = logprobs_of_fields(fields[level], tokens[level], 3)
        assert given == token_logprobs(logits, tokens[level], 3)
    loop.begin([1], ROWS)
    loop.step(ROWS)  # without masks: those of the last step do not count
    assert (
        loop.output[0, 0]
        == plain_logits(case.weights, case.pool(), case.state, LENGTH + len(tokens)).argmax()
    )


def test_shapes_of_drafts() -> None:
    from paceline.backends.cuda.decode.draft_shape import chain_shape, plan_step, tree_shape

    assert chain_shape(0).parents == (-1,)
    chain = plan_step(chain_shape(3), target_height=4, catch_up_rows=4, draft_height=4)
    assert [list(own.nodes) for own in chain.passes] == [[0, 1, 2, 3], [0, 1, 2, 3], [1], [2]]
    tree = tree_shape(8, 3, 3)
    assert len(tree) == 8
    assert tree.levels == 3
    for node, parent in enumerate(tree.parents):
        assert parent < node  # parents before children, so that a path's nodes ascend
    masked = plan_step(chain_shape(4), 4, 5, 4, at_once=True)
    assert [list(own.nodes) for own in masked.passes[1:]] == [[0, 1, 2, 3, 4], [1, 2, 3]]
    assert masked.children[1][:, 0, 0, 2].tolist() == [2, 3, 4]
    assert (chain.drafted, masked.drafted) == (3, 4)
    assert tree.path(tree.first_path[-1]) == tree.first_path
    assert tree.parents.index(0) == tree.first_path[1]
    plan = plan_step(tree, 4, 4, 4)
    assert [list(own.nodes) for own in plan.passes[2:]] == [tree.inner(1), tree.inner(2)]
    targets = [child[0, 2] for table in plan.children for row in table for child in row if child[0, 2] >= 0]
    assert sorted(targets) == list(range(1, 8))  # every node is drafted once
