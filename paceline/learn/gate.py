"""The gate: whether a candidate drafts better than the present head, by rows that neither was trained on.

Each row was replayed with both heads, so the passes of one answer are compared with the passes of the same
answer. The tokens are the same, so the gain in tokens per second is

    passes of the present head / passes of the candidate, times seconds of a pass: present / candidate

with an interval from resampled rows (the bootstrap of paired rows; Efron, 1979).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ALL = "all"  # the name of all segments together

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RowScore:
    """One answer on record, drafted again with a head."""

    prompt: str  # a hash: rows with the same one are one observation
    segment: str
    tokens: int
    passes: int  # of the target, which would have given these tokens
    offered: tuple[int, ...] = ()  # [position] drafts that were verified up to there
    accepted: tuple[int, ...] = ()  # [position] of those, the ones that were right
    client: str = ""  # hash of the API key

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RowScore:
        """A score as `asdict` gave it. KeyError, TypeError or ValueError if it is none."""
        offered, accepted = (tuple(int(count) for count in row[name]) for name in ("offered", "accepted"))
        names, numbers = (str(row["prompt"]), str(row["segment"])), (int(row["tokens"]), int(row["passes"]))
        return cls(*names, *numbers, offered, accepted, str(row["client"]))


@dataclass(frozen=True)
class GateConfig:
    """When a candidate passes."""

    min_prompts: int = 12  # fewer are no evidence; of 200 rows about 20 are held back
    min_segment: int = 8  # prompts of a segment, or of a client, that is judged by itself
    min_gain: float = 0.02  # of the tokens per second, overall: less is not worth a swap
    max_loss: float = 0.02  # of a segment's
    confidence: float = 0.95  # of the intervals
    samples: int = 2000  # of the bootstrap


@dataclass(frozen=True)
class Gain:
    """The candidate's tokens per second over the present head's, of one segment or one client."""

    segment: str  # or "client" and the hash of its API key
    prompts: int
    present: float  # tokens per pass
    candidate: float
    ratio: float
    low: float  # of the interval
    high: float


@dataclass(frozen=True)
class Verdict:
    """What the gate decided, and why."""

    passes: bool
    reason: str
    gains: tuple[Gain, ...] = ()  # overall first

    def evidence(self) -> dict[str, Any]:
        """The verdict as JSON."""
        return {"passes": self.passes, "reason": self.reason, "gains": [asdict(gain) for gain in self.gains]}


def judge(
    present: Sequence[RowScore],
    candidate: Sequence[RowScore],
    cost: float = 1.0,
    config: GateConfig | None = None,
) -> Verdict:
    """Whether the candidate replaces the present head, by the scores of the same rows in the same order.

    `cost` is the time of a pass with the candidate over that with the present head. Heads of the same sizes
    take the same time; the trial on live traffic measures both.
    """
    config = config or GateConfig()
    if [(row.prompt, row.tokens) for row in present] != [(row.prompt, row.tokens) for row in candidate]:
        return Verdict(False, "the two heads were not scored on the same rows")
    gains = [_gain(ALL, present, candidate, cost, config)]
    for name, chosen in _groups(present).items():
        rows = [present[index] for index in chosen], [candidate[index] for index in chosen]
        gains.append(_gain(name, *rows, cost, config))
    overall, *others = gains
    judged = [gain for gain in others if gain.prompts >= config.min_segment]
    losing = [gain for gain in judged if gain.ratio < 1 - config.max_loss and gain.high < 1]
    if overall.prompts < config.min_prompts:
        reason = f"{overall.prompts} held-back prompts are too few: {config.min_prompts} are needed"
    elif overall.ratio < 1 + config.min_gain or overall.low <= 1:
        reason = f"no significant gain: {_told(overall)}"
    elif losing:
        reason = f"{losing[0].segment!r} loses: {_told(losing[0])}"
    else:
        return Verdict(True, f"it gains: {_told(overall)}", tuple(gains))
    return Verdict(False, reason, tuple(gains))


def _groups(rows: Sequence[RowScore]) -> dict[str, list[int]]:
    """The rows of each segment and of each client, where there are several: all of them must not lose.

    So no client can train the head for itself at the cost of others, however much it sends.
    """
    groups: dict[str, list[int]] = {}
    for names in ([row.segment for row in rows], [f"client {row.client}" for row in rows]):
        for name in sorted(set(names)) if len(set(names)) > 1 else []:
            groups[name] = [index for index, each in enumerate(names) if each == name]
    return groups


def tokens_per_pass(scores: Sequence[RowScore]) -> float:
    """Tokens per pass of the target, over all rows."""
    return sum(row.tokens for row in scores) / max(1, sum(row.passes for row in scores))


def acceptance_by_position(scores: Sequence[RowScore]) -> list[float]:
    """The share of drafts that were right up to each position, of those that reached it."""
    width = max((len(row.offered) for row in scores), default=0)
    offered, accepted = np.zeros(width), np.zeros(width)
    for row in scores:
        offered[: len(row.offered)] += row.offered
        accepted[: len(row.accepted)] += row.accepted
    return [float(share) for share in accepted / np.maximum(offered, 1)]


def _gain(
    segment: str,
    present: Sequence[RowScore],
    candidate: Sequence[RowScore],
    cost: float,
    config: GateConfig,
) -> Gain:
    """The gain of one segment with its interval; rows with the same prompt are drawn together."""
    by_prompt: dict[str, list[int]] = {}
    for old, new in zip(present, candidate, strict=True):
        sums = by_prompt.setdefault(old.prompt, [0, 0])
        sums[0] += old.passes
        sums[1] += new.passes
    passes = np.array(list(by_prompt.values()), dtype=np.float64).reshape(-1, 2)
    low = high = ratio = 0.0
    if len(passes):
        ratio = float(_ratios(passes.sum(0), cost))
        # the same rows give the same verdict: nothing here is random but the choice of rows, by a fixed seed
        drawn = np.random.default_rng(0).integers(0, len(passes), (config.samples, len(passes)))
        ratios = _ratios(passes[drawn].sum(1), cost)
        tail = (1 - config.confidence) / 2
        low, high = (float(np.quantile(ratios, share)) for share in (tail, 1 - tail))
    before, after = tokens_per_pass(present), tokens_per_pass(candidate)
    return Gain(segment, len(passes), before, after, ratio, low, high)


def _ratios(passes: Float64Array, cost: float) -> Float64Array:
    """The gains in tokens per second, from passes of the present head and of the candidate: [..., 2]."""
    gains: Float64Array = passes[..., 0] / np.maximum(passes[..., 1], 1.0) / cost
    return gains


def _told(gain: Gain) -> str:
    return (
        f"{gain.present:.2f} to {gain.candidate:.2f} tokens per pass, ratio {gain.ratio:.3f} "
        f"(95 %: {gain.low:.3f} to {gain.high:.3f}) on {gain.prompts} prompts"
    )
