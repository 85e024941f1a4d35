"""Many texts at once through the compiled rules, with drafts drawn by the engine's own keyed noise.

The target and the drafter look at the position and the token before: tables [positions, 1 + vocab, vocab],
where line 0 of a position is for the start of a text. Texts grow by whole steps, as in the engine, so
noise that is used twice across steps shows too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.verify.kernels import uniforms
from paceline.verify.noise import STREAM_ACCEPT, STREAM_DRAFT, STREAM_RESIDUAL, lane
from tests.lossless.enumeration import Shape

VOCAB = 16


@dataclass(frozen=True)
class Tables:
    target: np.ndarray  # [positions, 1 + vocab, vocab]
    draft: np.ndarray  # [positions, 1 + vocab, vocab]


def adversarial_tables(seed: int, positions: int = 8) -> Tables:
    """Half of the drafter's probability is where the target has little."""
    rng = np.random.default_rng(seed)
    target = rng.dirichlet(np.full(VOCAB, 0.6), size=(positions, 1 + VOCAB))
    draft = 0.5 * rng.dirichlet(np.full(VOCAB, 1.0), size=target.shape[:2]) + 0.5 * target[..., ::-1]
    return Tables(target, draft / draft.sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Noise:
    """The uniforms of a step of many texts, keyed as the engine keys them. Planted bugs override it."""

    seeds: np.ndarray  # uint64 [texts]
    positions: np.ndarray  # uint64 [texts] of the first new token

    def of(self, stream: int, node: int, depth: int) -> np.ndarray:
        """One uniform for each text."""
        return uniforms(self.seeds, self.positions, np.full_like(self.seeds, lane(stream, node)))

    def draft(self, node: int, depth: int) -> np.ndarray:
        return self.of(STREAM_DRAFT, node, depth)

    def coin(self, node: int, depth: int) -> np.ndarray:
        return self.of(STREAM_ACCEPT, node, depth)

    def final(self) -> np.ndarray:
        return self.of(STREAM_RESIDUAL, 0, 0)


def inverted(probs: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """The first token of each line where the cumulative sum exceeds its share: int64 [lines]."""
    reached = np.cumsum(probs, axis=1)
    return (reached <= (uniform * reached[:, -1])[:, None]).sum(axis=1)


def step(decide: Callable, tables: Tables, shape: Shape, before: np.ndarray, noise: Noise) -> np.ndarray:
    """The new tokens of each text, filled up with -1: int64 [texts, 1 + depth]."""
    texts, size = len(before), len(shape)
    at = noise.positions.astype(np.int64)
    tokens = np.empty((texts, size), dtype=np.int64)
    rows = np.full((texts, size), -1, dtype=np.int64)
    target_probs = np.empty((texts, 1 + size, VOCAB))
    target_probs[:, 0] = tables.target[at, before]
    paths: list[list[int]] = []
    for node, (parent, how) in enumerate(shape):
        above = [] if parent < 0 else paths[parent]
        depth = len(above)
        previous = before if parent < 0 else 1 + tokens[:, parent]
        left = tables.draft[at + depth, previous]
        for sibling in range(node):
            if shape[sibling][0] == parent:
                np.put_along_axis(left, tokens[:, sibling, None], 0.0, axis=1)
        if how == "drawn":
            tokens[:, node] = inverted(left, noise.draft(node, depth))
            rows[:, node] = (at + depth) * (1 + VOCAB) + previous
        else:
            tokens[:, node] = np.argmax(left, axis=1)
        target_probs[:, 1 + node] = tables.target[at + depth + 1, 1 + tokens[:, node]]
        paths.append([*above, node])
    parents = np.array([parent for parent, _ in shape], dtype=np.int64)
    coins = np.stack([noise.coin(node, len(paths[node]) - 1) for node in range(size)], axis=1)
    ends, last = decide(
        target_probs.reshape(-1, VOCAB),
        tokens.ravel(),
        np.tile(parents, texts),
        np.ones(texts * size, dtype=np.bool_),
        np.arange(texts + 1, dtype=np.int64) * size,
        tables.draft.reshape(-1, VOCAB),
        rows.ravel(),
        coins.ravel(),
        noise.final(),
    )
    new = np.full((texts, 1 + max(map(len, paths))), -1, dtype=np.int64)
    for end in range(-1, size):
        met = ends == end
        path = [] if end < 0 else paths[end]
        new[met, : len(path)] = tokens[met][:, path]
        new[met, len(path)] = last[met]
    return new


def simulate(
    decide: Callable, tables: Tables, shape: Shape, trials: int, length: int, noise: type[Noise] = Noise
) -> np.ndarray:
    """The first `length` tokens of many texts, each with a seed of its own: int64 [trials, length]."""
    room = length + len(shape) + 1
    texts = np.full((trials, room), -1, dtype=np.int64)
    counts = np.zeros(trials, dtype=np.int64)
    while (short := np.flatnonzero(counts < length)).size:
        for part in np.array_split(short, math.ceil(len(short) / 50_000)):
            done = counts[part]
            before = np.where(done > 0, 1 + texts[part, done - 1], 0)
            new = step(decide, tables, shape, before, noise(part.astype(np.uint64), done.astype(np.uint64)))
            for column in range(new.shape[1]):
                valid = new[:, column] >= 0
                texts[part[valid], done[valid] + column] = new[valid, column]
            counts[part] += (new >= 0).sum(axis=1)
    return texts[:, :length]


def deviation(tables: Tables, texts: np.ndarray) -> float:
    """How many standard deviations the chi-squared statistic of whole texts is above its mean."""
    trials, length = texts.shape
    expected = np.array([float(trials)])
    previous = np.array([0])
    cells = np.zeros(trials, dtype=np.int64)
    for position in range(length):
        expected = (expected[:, None] * tables.target[position, previous]).ravel()
        previous = np.tile(1 + np.arange(VOCAB), len(expected) // VOCAB)
        cells = cells * VOCAB + texts[:, position]
    counts = np.bincount(cells, minlength=len(expected)).astype(np.float64)
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))
