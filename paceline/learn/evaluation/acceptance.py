"""Acceptance of a replay by segment and by position of the draft, for `paceline learn score`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.learn.evaluation.gate import ALL, Replay, RowScore, tokens_per_pass


def acceptance_by_position(scores: Sequence[RowScore]) -> list[float]:
    """[position] The acceptance rate of tokens whose predecessors in the draft were all accepted."""
    passes = [accepted for row in scores for accepted in row.accepted]
    reached = [
        sum(accepted >= position for accepted in passes) for position in range(max(passes, default=0) + 1)
    ]
    return [after / before for before, after in pairwise(reached)]


def acceptance_lines(replay: Replay) -> list[str]:
    """A line for each segment: tokens per pass and acceptance by position, with the current head and the
    candidate."""
    segments = sorted({row.segment for row in replay.present})
    return [_line(ALL, replay.present, replay.candidate)] + [
        _line(
            repr(name),
            *([row for row in rows if row.segment == name] for rows in (replay.present, replay.candidate)),
        )
        for name in segments
        if len(segments) > 1
    ]


def _line(name: str, *heads: Sequence[RowScore]) -> str:
    gain = " -> ".join(f"{tokens_per_pass(scores):.2f}" for scores in heads)
    shares = " -> ".join(
        " ".join(f"{share:.2f}" for share in acceptance_by_position(scores)) for scores in heads
    )
    return f"{name}: {gain} tokens per pass; accepted by position: {shares}"
