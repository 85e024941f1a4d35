"""The gate: whether a candidate drafts better than the current head, by rows that neither was trained on.

Each row was replayed with both heads, so the passes of one answer are compared with the passes of the same
answer. The tokens are the same, so the gain in tokens per second is

    passes of the current head / passes of the candidate, times seconds of a pass: present / candidate

with an interval from resampled rows (the bootstrap of paired rows; Efron, 1979).

Replaying takes long. So rows come in a random order, and the verdict is also tried after the first 32, 64 and
128 of them: a group-sequential test, which finds a large gain or none early, and a small gain after all rows.
Each of these looks may err, so each gets an equal share of the allowed error (Bonferroni).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    client: str = ""  # hash of the API key
    accepted: tuple[int, ...] = ()  # [passes] drafted tokens that each pass accepted

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RowScore:
        """The score that `asdict` gave. KeyError, TypeError or ValueError if it is not one."""
        names, numbers = (str(row["prompt"]), str(row["segment"])), (int(row["tokens"]), int(row["passes"]))
        return cls(*names, *numbers, str(row["client"]), tuple(int(count) for count in row["accepted"]))


@dataclass(frozen=True)
class Replay:
    """The scores of two heads on the same rows, in the same order: all planned ones or the first of them."""

    present: list[RowScore]
    candidate: list[RowScore]
    planned: int  # rows
    groups: Mapping[str, int]  # planned rows of each group, see group_sizes

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Replay:
        """The replay that `asdict` gave. KeyError, TypeError, AttributeError or ValueError if it is none."""
        present, candidate = (
            [RowScore.from_json(row) for row in facts[name]] for name in ("present", "candidate")
        )
        groups = {str(name): int(size) for name, size in facts["groups"].items()}
        return cls(present, candidate, int(facts["planned"]), groups)


@dataclass(frozen=True)
class GateConfig:
    """When a candidate passes."""

    min_prompts: int = 12  # fewer are no evidence; of 200 rows about 20 are held back
    min_segment: int = 8  # prompts of a segment or client; with fewer it is not judged separately
    min_gain: float = 0.02  # of the tokens per second, overall: less is not worth a swap
    max_loss: float = 0.02  # of a segment's
    confidence: float = 0.95  # in a gain overall; of a segment's interval
    looks: tuple[int, ...] = (32, 64, 128)  # rows that are judged before all have been scored
    samples: int = 2000  # of the bootstrap

    def confidence_of_look(self, planned: int) -> float:
        """The confidence in a gain that each look needs, with this number of planned rows."""
        looks = 1 + sum(look < planned for look in self.looks)
        return 1 - (1 - self.confidence) / looks


@dataclass(frozen=True)
class Gain:
    """The candidate's tokens per second over the current head's, of one segment or one client."""

    segment: str  # or "client" and the hash of its API key
    prompts: int
    present: float  # tokens per pass
    candidate: float
    ratio: float
    low: float  # of the interval
    high: float
    confidence: float  # of the interval


@dataclass(frozen=True)
class Verdict:
    """What the gate decided, and why."""

    passes: bool
    reason: str
    gains: tuple[Gain, ...] = ()  # overall first
    decided: bool = True  # False: more of the planned rows may change it

    def evidence(self) -> dict[str, Any]:
        """The verdict as JSON."""
        return {"passes": self.passes, "reason": self.reason, "gains": [asdict(gain) for gain in self.gains]}


def judge(replay: Replay, cost: float = 1.0, config: GateConfig | None = None) -> Verdict:
    """Whether the candidate replaces the current head.

    `cost` is the time of a pass with the candidate over that with the current head. Heads of the same sizes
    take the same time; the trial on live traffic measures both.
    """
    config = config or GateConfig()
    present, candidate = replay.present, replay.candidate
    if [(row.prompt, row.tokens) for row in present] != [(row.prompt, row.tokens) for row in candidate]:
        return Verdict(False, "the two heads were not scored on the same rows")
    confidence = config.confidence_of_look(replay.planned)
    overall = _gain(ALL, present, candidate, cost, confidence, config.samples)
    others = list[Gain]()
    for name in replay.groups:
        chosen = [index for index, row in enumerate(present) if name in groups_of(row.segment, row.client)]
        rows = [present[index] for index in chosen], [candidate[index] for index in chosen]
        others.append(_gain(name, *rows, cost, config.confidence, config.samples))
    passes, reason = _gate(overall, others, config)
    decided = len(present) >= replay.planned or _is_clear(passes, overall, others, replay.groups, config)
    return Verdict(passes and decided, reason, (overall, *others), decided)


def _gate(overall: Gain, others: Sequence[Gain], config: GateConfig) -> tuple[bool, str]:
    """Whether a candidate with these gains passes, and why; as if there were no more rows."""
    judged = [gain for gain in others if gain.prompts >= config.min_segment]
    losing = [gain for gain in judged if gain.ratio < 1 - config.max_loss and gain.high < 1]
    if overall.prompts < config.min_prompts:
        return False, f"{overall.prompts} held-back prompts are too few: {config.min_prompts} are needed"
    if overall.ratio < 1 + config.min_gain or overall.low <= 1:
        return False, f"no significant gain: {_told(overall)}"
    if losing:
        return False, f"{losing[0].segment!r} loses: {_told(losing[0])}"
    return True, f"it gains: {_told(overall)}"


def _is_clear(
    passes: bool, overall: Gain, others: Sequence[Gain], planned: Mapping[str, int], config: GateConfig
) -> bool:
    """Whether a verdict on some of the rows is final.

    A candidate passes early only if the interval of each group with enough rows planned excludes a loss of
    `max_loss`: few rows rarely show a loss that all rows would. It is refused early only if its gain is
    certainly too small.
    """
    if not passes:
        return overall.prompts >= config.min_prompts and overall.high < 1 + config.min_gain
    judged = [gain for gain in others if planned[gain.segment] >= config.min_segment]
    return all(gain.prompts >= config.min_segment and gain.low >= 1 - config.max_loss for gain in judged)


def groups_of(segment: str, client: str) -> tuple[str, str]:
    """The groups of a row: its segment, and its client by the hash of its API key. None of them may lose.

    So no client can train the head for itself at the cost of others, however much it sends.
    """
    return segment, f"client {client}"


def group_sizes(rows: Iterable[tuple[str, str]]) -> dict[str, int]:
    """The number of rows by segment and by client, if there are several of these."""
    by_kind = zip(*(groups_of(*row) for row in rows), strict=True)
    counts = [Counter(names) for names in by_kind]
    return {name: size for count in counts if len(count) > 1 for name, size in sorted(count.items())}


def tokens_per_pass(scores: Sequence[RowScore]) -> float:
    """Tokens per pass of the target, over all rows."""
    return sum(row.tokens for row in scores) / max(1, sum(row.passes for row in scores))


def _gain(
    segment: str,
    present: Sequence[RowScore],
    candidate: Sequence[RowScore],
    cost: float,
    confidence: float,
    samples: int,
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
        drawn = np.random.default_rng(0).integers(0, len(passes), (samples, len(passes)))
        ratios = _ratios(passes[drawn].sum(1), cost)
        tail = (1 - confidence) / 2
        low, high = (float(np.quantile(ratios, share)) for share in (tail, 1 - tail))
    before, after = tokens_per_pass(present), tokens_per_pass(candidate)
    return Gain(segment, len(passes), before, after, ratio, low, high, confidence)


def _ratios(passes: Float64Array, cost: float) -> Float64Array:
    """The gains in tokens per second, from passes of the current head and of the candidate: [..., 2]."""
    gains: Float64Array = passes[..., 0] / np.maximum(passes[..., 1], 1.0) / cost
    return gains


def _told(gain: Gain) -> str:
    return (
        f"{gain.present:.2f} to {gain.candidate:.2f} tokens per pass, ratio {gain.ratio:.3f} "
        f"({100 * gain.confidence:g} %: {gain.low:.3f} to {gain.high:.3f}) on {gain.prompts} prompts"
    )
