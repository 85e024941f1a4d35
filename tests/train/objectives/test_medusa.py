"""Medusa heads in training: they start like the target, and learn the tokens further ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError
from paceline.models.heads.config import TargetName
from paceline.models.heads.medusa import load_medusa
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.loop.sequences import target_states
from paceline.train.loop.trainer import Trainer
from paceline.train.objectives.medusa import NEVER, MedusaObjective, likeliest_paths
from paceline.train.options import MedusaOptions
from tests import tiny_families
from tests.models.heads.test_medusa_heads import random_medusa
from tests.train.heads import by_document, random_batch

OPTIONS = MedusaOptions(
    heads=3, layers=1, max_steps=60, draft_vocab_size=80, batch_tokens=96, warmup_steps=5, held_out=0.1
)


def random_objective(target: Transformer, examples: Examples) -> MedusaObjective:
    """An objective whose heads have random weights and predict every second token."""
    ids = np.arange(3, tiny_families.VOCAB_SIZE, 2, dtype=np.int32)
    config = replace(random_medusa().config, draft_vocab_size=len(ids))
    return MedusaObjective(target, examples, OPTIONS, init_from=random_medusa(config, ids))


def test_the_loss_of_each_head_is_the_cross_entropy_to_the_target(
    target: Transformer, examples: Examples
) -> None:
    objective, given = random_objective(target, examples), random_batch()
    ids = torch.from_numpy(objective.draft_ids).long()
    losses: list[list[float]] = [[] for _ in range(3)]
    matches: list[list[float]] = [[] for _ in range(3)]
    finals = by_document(given, target_states(target, given, (3,)).final)
    rows = zip(given.answers, given.sizes, finals, by_document(given, given.tokens), strict=True)
    for answer, length, states, _tokens in rows:
        for token in range(answer - 1, length - 2):
            guesses = objective.network(states[token]).detach()
            for head in range(3):
                taught_by = token + 1 + head
                if taught_by + 1 >= length:  # nothing was answered there
                    break
                scores = states[taught_by] @ target.head.T
                wanted = scores[ids].softmax(-1)
                losses[head].append(-float((wanted * guesses[head].log_softmax(-1)).sum()))
                matches[head].append(float(ids[guesses[head].argmax()] == scores.argmax()))
    result = objective.losses(given)
    assert result.losses.tolist() == pytest.approx([np.mean(each) for each in losses], rel=1e-4)
    assert result.matches.tolist() == pytest.approx([np.mean(each) for each in matches])


def test_new_heads_score_as_their_target(target: Transformer, examples: Examples) -> None:
    objective = MedusaObjective(target, examples, OPTIONS)
    state = torch.randn(60, generator=torch.Generator().manual_seed(0))
    scores = target.logits(state)[torch.from_numpy(objective.draft_ids).long()]
    for guesses in objective.network(target.norm(state)):
        torch.testing.assert_close(guesses, scores)


def test_trained_heads_are_written_as_trained(
    target: Transformer, examples: Examples, tmp_path: Path
) -> None:
    objective = MedusaObjective(target, examples, OPTIONS, TargetName("abc", "tiny"))
    before = objective.snapshot()
    history = Trainer(objective, examples, OPTIONS, tmp_path).train().history
    assert history[-1].loss < 0.95 * history[0].loss
    before(tmp_path / "before")
    objective.snapshot()(tmp_path / "after")
    untrained, trained = load_medusa(tmp_path / "before"), load_medusa(tmp_path / "after")
    assert trained.config == objective.config
    assert trained.draft_ids is not None
    assert trained.draft_ids.tolist() == objective.draft_ids.tolist()
    assert not untrained.tensors["blocks.2.layers.0.weight"].float32().any()
    further = MedusaObjective(target, examples, OPTIONS, TargetName("def", "tuned"), init_from=trained)
    assert further.config == replace(trained.config, target=TargetName("def", "tuned"))
    for (name, parameter), own in zip(
        further.network.named_parameters(), objective.network.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, own, rtol=1e-3, atol=1e-6, msg=name)  # float16
        assert parameter.requires_grad


def test_a_tree_has_the_most_frequently_accepted_paths() -> None:
    ranks = [[0, 0], [0, 1], [0, NEVER], [1, 1], [NEVER, 0], [0, 0], [11, 0]]
    assert likeliest_paths(ranks) == ((0,), (0, 0), (1,), (0, 1), (1, 1))
    assert likeliest_paths(ranks, 2) == ((0,), (0, 0))


def test_ranks_count_the_tokens_scored_above_the_true_one(
    target: Transformer, examples: Examples, tmp_path: Path
) -> None:
    objective, given = random_objective(target, examples), random_batch()
    ids, ranks = objective.draft_ids.tolist(), []
    finals = by_document(given, target_states(target, given, (3,)).final)
    rows = zip(given.answers, given.sizes, finals, by_document(given, given.tokens), strict=True)
    for answer, length, states, tokens in rows:
        tokens = tokens.tolist()
        for token in range(answer - 1, length - 2):
            guesses = objective.network(states[token]).detach().argsort(-1, descending=True).tolist()
            ahead = [tokens[token + 2 + head] if token + 2 + head < length else None for head in range(3)]
            ranks.append(
                [
                    guesses[head].index(ids.index(true)) if true in ids else NEVER
                    for head, true in enumerate(ahead)
                ]
            )
    objective.calibrate([given])
    objective.snapshot()(tmp_path)
    assert objective._ranks(given).tolist() == ranks
    assert load_medusa(tmp_path).paths == likeliest_paths(ranks)


def test_heads_of_another_target_are_refused(target: Transformer, examples: Examples) -> None:
    narrow = replace(random_medusa().config, hidden_size=44)
    large = np.arange(20, 193, dtype=np.int32)  # this target has no token 173
    for heads in (random_medusa(narrow), random_medusa(draft_ids=large)):
        with pytest.raises(ConfigError, match="Give heads that were trained for it"):
            MedusaObjective(target, examples, OPTIONS, init_from=heads)
