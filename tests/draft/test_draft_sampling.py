"""What heads draft at each temperature and sampling method, against noise computed here.

Drafting, verification and the references of other tests share one sampler, so a fault in when it adds noise
would be the same on all sides. Here candidates come from logits and the numpy reference of the noise only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest

from paceline.backends.block_chains import chains_by_guesses
from paceline.backends.heads import BlockGuesses, BlockRunner
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import DraftPlan
from paceline.draft.base import DraftSampling
from paceline.draft.heads.block import DFlashDrafter
from paceline.draft.heads.head_drafter import HeadShape, LoadedHead, PagedHeadDrafter
from paceline.draft.model.vocabulary import trimmed_vocabulary
from paceline.models.heads.config import BlockAttention, BlockConfig
from paceline.verify import sampling as sampling_room
from paceline.verify.sampling import ALL_IDS, Sampler
from tests.draft.draft_models import drafting_engine
from tests.engines import Later
from tests.models.heads.toy_head import ToyHeadPool, drain, toy_eagle
from tests.toy import VOCAB, ToyBackend
from tests.verify.reference import gumbel_reference

PROMPT = [5, 2, 3, 4]
HOT = 0.9  # temperature of the sampled requests
CHAIN, TREE = (4, 1), (9, 3)  # budget, branching
BLOCK = BlockConfig(size=5, mask_token_id=1, layers=(BlockAttention(),))
TOY = ToyBackend(max_rows=128)


def slot_logits(previous: int, position: int) -> np.ndarray:
    """What the toy block head guesses for the token at a position, after the token before it."""
    return TOY.logits_of(np.array([previous]), np.array([position]))


class ToyBlockRunner(BlockRunner):
    """A parallel head whose guesses depend on the position and the token before."""

    page_size, max_rows, least_chance = TOY.page_size, TOY.max_rows, 0.0

    def make_pool(self, num_pages):
        return ToyHeadPool(num_pages, self.page_size)

    def bytes_per_page(self):
        return 16 * self.page_size

    def write_context(self, batch):
        return

    def run_blocks(self, blocks):
        self._positions = blocks.positions

    def guess(self, slots, previous):
        pairs = zip(previous.tolist(), self._positions[slots].tolist(), strict=True)
        return BlockGuesses(np.stack([slot_logits(*pair) for pair in pairs]), None)

    def run_chains(self, blocks, most, least_chance, noise):
        self.run_blocks(blocks)
        return chains_by_guesses(self.guess, blocks, BLOCK, None, most, least_chance, noise)


def path_logits(request: Request, path: Sequence[int]) -> np.ndarray:
    """The toy EAGLE head's logits after a path below the request's tokens."""
    tokens = np.array([*request.token_ids, *path])
    return TOY.logits_of(tokens, np.arange(len(tokens)))


def block_logits(request: Request, path: Sequence[int]) -> np.ndarray:
    tokens = [*request.token_ids, *path]
    return slot_logits(tokens[-1], len(tokens))


def eagle_drafter(sampling: DraftSampling):
    return toy_eagle(sampling=sampling)


def block_drafter(sampling: DraftSampling):
    shape = HeadShape((2, 1), 2, trimmed_vocabulary(None, VOCAB), 256, BLOCK)
    return Later(DFlashDrafter.unbound(LoadedHead(ToyBlockRunner(), shape, sampling)))


HEADS = {"eagle3": (eagle_drafter, path_logits), "block": (block_drafter, block_logits)}


@lru_cache(maxsize=1024)
def token_noise(seed: int, position: int) -> np.ndarray:
    return gumbel_reference(seed, position, np.arange(VOCAB))


def misplaced_nodes(head: str, sampling: DraftSampling, temperature: float, shape: tuple[int, int]) -> int:
    """Drafted nodes that are not among the best candidates of their parents, in one engine's run."""
    make, logits_of = HEADS[head]
    drafter, (budget, branching) = make(sampling), shape
    engine = drafting_engine(drafter, DraftPlan(drafter.name, budget, branching))
    misplaced, seen, propose = 0, 0, drafter.propose

    def checked(requests, plans):
        nonlocal misplaced, seen
        trees = propose(requests, plans)
        for number, request in enumerate(requests):
            paths: list[tuple[int, ...]] = []
            best: dict[tuple[int, ...], set[int]] = {}  # by the path of their parent
            for token, parent in zip(*trees.tree_lists(number), strict=True):
                above = paths[parent] if parent >= 0 else ()
                paths.append((*above, token))
                if above not in best:
                    scores = logits_of(request, above).astype(np.float64)
                    if temperature > 0.0 and sampling is DraftSampling.COUPLED:
                        position = len(request.token_ids) + len(above)
                        scores = scores / temperature + token_noise(request.seed, position)
                    best[above] = set(np.argsort(-scores, kind="stable")[:branching].tolist())
                misplaced += token not in best[above]
                seen += 1
        return trees

    drafter.propose = checked
    for seed in range(4):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=30, ignore_eos=True)
        (request,) = engine.add_request(PROMPT, params)
    drain(engine, drafter)
    assert not request.failed_drafters
    assert seen > 60
    return misplaced


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("sampling", "temperature"),
    [
        (DraftSampling.COUPLED, HOT),
        (DraftSampling.COUPLED, 0.0),
        (DraftSampling.GREEDY, HOT),
    ],
    ids=["coupled", "coupled at 0", "greedy"],
)
def test_candidates_have_the_targets_noise_if_and_only_if_they_are_coupled(
    head, sampling, temperature, shape
):
    assert misplaced_nodes(head, sampling, temperature, shape) == 0


def noise_for_greedy_drafts(plant):
    """The sampler adds noise to the candidates of greedy drafts, too."""
    candidates = Sampler.candidates

    def always_coupled(self, state, logits, position, num_output, count, coupled, known=ALL_IDS):
        return candidates(self, state, logits, position, num_output, count, True, known)

    plant(Sampler, "candidates", always_coupled)


def noise_at_temperature_0(plant):
    """Greedy requests' candidates are ranked with noise."""
    best = sampling_room.best_candidates

    def always_coupled(candidates, options, scratch, key, coupled, count):
        return best(candidates, options, scratch, key, True, count)

    plant(sampling_room, "best_candidates", always_coupled)


def greedy_chains_by_the_runner(plant):
    """The runner, which couples, drafts the chains of sampled requests whatever the method."""
    plant(PagedHeadDrafter, "_is_one_call", lambda self, request, plan: plan.branching == 1)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("bug", "temperature", "shape"),
    [
        (noise_for_greedy_drafts, HOT, TREE),
        (noise_at_temperature_0, 0.0, TREE),
        (greedy_chains_by_the_runner, HOT, CHAIN),
    ],
)
def test_noise_in_greedy_drafts_is_noticed(head, bug, temperature, shape, plant):
    bug(plant)
    assert misplaced_nodes(head, DraftSampling.GREEDY, temperature, shape) > 5
    plant.assert_ran()
