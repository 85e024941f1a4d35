"""What a server that learns loses beside one that does not: ratios of turns, their errors, and the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.report.result import Result, Table

LEAST = {"cpu": 0.95, "cuda": 0.97}  # bar of both ratios with one client, by device
LEAST_UNDER_LOAD = 0.99  # with more clients, for which the trainer waits


@dataclass
class Turn:
    """What the clients of a server saw in one turn."""

    seconds: float
    tokens: int
    latencies: list[float]  # seconds of each request
    trained: float = 0.0  # seconds in which the trainer computed: of a GPU, else CPU time
    served: float = 0.0  # CPU seconds of the server
    passes: int = 0  # of the server
    drafted: int = 0  # tokens
    steps: int = 0  # of the trainer; a GPU's trainer reports every tenth

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def p95(self) -> float:
        """Seconds in which 95 % of the requests are answered."""
        return _p95(self.latencies)


@dataclass
class Side:
    """All turns of one server with one number of clients."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return sum(turn.tokens for turn in self.turns) / sum(turn.seconds for turn in self.turns)

    @property
    def tokens_per_pass(self) -> float:
        """What drafts gain."""
        return sum(turn.tokens for turn in self.turns) / max(1, sum(turn.passes for turn in self.turns))

    @property
    def drafted_per_pass(self) -> float:
        return sum(turn.drafted for turn in self.turns) / max(1, sum(turn.passes for turn in self.turns))

    @property
    def cpu(self) -> float:
        """CPU seconds of the server per token: unlike times, hardly changed by other work on the machine."""
        return sum(turn.served for turn in self.turns) / sum(turn.tokens for turn in self.turns)

    @property
    def p95(self) -> float:
        """Seconds in which 95 % of the requests are answered."""
        return _p95([each for turn in self.turns for each in turn.latencies])

    @property
    def median(self) -> float:
        """Seconds of the median request: few training steps do not change it."""
        return statistics.median([each for turn in self.turns for each in turn.latencies])

    @property
    def trainer_share(self) -> float:
        """Seconds of the trainer per second: see Turn."""
        return sum(turn.trained for turn in self.turns) / sum(turn.seconds for turn in self.turns)


@dataclass(frozen=True)
class Compared:
    """All servers with one number of clients."""

    clients: int
    first: Side  # without --learn
    control: Side  # another one without
    learning: Side
    device: str = "cpu"
    slowdown: float | None = None  # as the server measured it

    @property
    def without(self) -> Side:
        """Both servers without --learn."""
        return Side([*self.first.turns, *self.control.turns])

    @property
    def noise(self) -> float:
        """Tokens per second of one server without --learn over those of the other: 1 but for noise."""
        return self.control.throughput / self.first.throughput

    @property
    def throughput_ratio(self) -> float:
        return self.learning.throughput / self.without.throughput

    @property
    def latency_ratio(self) -> float:
        """The p95 latency without, over that with: below 1 is a loss, as for throughput."""
        return self.without.p95 / self.learning.p95

    @property
    def median_ratio(self) -> float:
        """The median latency without, over that with: the loss of requests that no training step touches."""
        return self.without.median / self.learning.median

    @property
    def by_round(self) -> list[tuple[float, float]]:
        """Both ratios in each round: of throughput and of p95 latency."""
        plain = zip(self.first.turns, self.control.turns, strict=True)
        rounds = [(Side(list(pair)), turn) for pair, turn in zip(plain, self.learning.turns, strict=True)]
        return [(after.throughput / before.throughput, before.p95 / after.p95) for before, after in rounds]

    @property
    def spread(self) -> tuple[float, float]:
        """Standard errors of the ratios of throughput and of p95 latency, by the rounds."""
        throughput, latency = zip(*self.by_round, strict=True)
        return _standard_error(throughput), _standard_error(latency)

    @property
    def steps(self) -> list[int]:
        """Steps of the trainer in each turn of its server."""
        return [turn.steps for turn in self.learning.turns]

    @property
    def cpu_ratio(self) -> float:
        """The server's CPU time per token without, over that with: below 1 is a loss."""
        return self.without.cpu / self.learning.cpu if self.learning.cpu else 1.0

    @property
    def summary(self) -> str:
        """Both ratios, and what the servers and the trainer did meanwhile."""
        throughput, latency = self.spread
        sides = (self.first, self.control, self.learning)
        passes = " ".join(f"{side.tokens_per_pass:.3f}" for side in sides)
        drafted = " ".join(f"{side.drafted_per_pass:.3f}" for side in sides)
        trained = [round(turn.trained, 3) for turn in self.learning.turns]
        rounds = " ".join(f"{ratio:.3f}" for ratio, _ in self.by_round)
        medians = [statistics.median(ratios) for ratios in zip(*self.by_round, strict=True)]
        return (
            f"{self.clients} clients: {self.throughput_ratio:.3f} +- {throughput:.3f} of the tokens/s, "
            f"{self.latency_ratio:.3f} +- {latency:.3f} by p95 latency, {self.median_ratio:.3f} by median "
            f"latency; without/without {self.noise:.3f}\n"
            f"  of the tokens/s in each round: {rounds}; median {medians[0]:.3f}, by p95 {medians[1]:.3f}\n"
            f"  without, without, with: tokens per pass {passes}, drafted tokens per pass {drafted}\n"
            f"  the trainer: steps in each turn {self.steps}, seconds {trained}, slowdown {self.slowdown}"
        )

    @property
    def bar(self) -> float:
        return LEAST[self.device] if self.clients == 1 else LEAST_UNDER_LOAD


def _p95(latencies: Sequence[float]) -> float:
    return sorted(latencies)[min(len(latencies) - 1, int(0.95 * len(latencies)))]


def _standard_error(ratios: Sequence[float]) -> float:
    """Of the mean logarithm of ratios."""
    logs = [math.log(ratio) for ratio in ratios]
    return statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan


def learning_load_result(compared: Sequence[Compared], facts: dict[str, Any]) -> Result:
    """Throughput and p95 latency of both servers, with the ratios that have bars."""
    title = f"{facts['model']}: a server that learns beside one that does not, in turns"
    rows = [
        (
            str(each.clients),
            f"{each.without.throughput:.1f}",
            f"{each.learning.throughput:.1f}",
            f"{each.throughput_ratio:.3f} +- {each.spread[0]:.3f}",
            f"{each.noise:.3f}",
            f"{each.cpu_ratio:.3f}",
            f"{each.without.p95:.3f}",
            f"{each.learning.p95:.3f}",
            f"{each.latency_ratio:.3f} +- {each.spread[1]:.3f}",
            f"{each.bar:.2f}",
            f"{each.learning.trainer_share:.3f}",
            str(sum(each.steps)),
        )
        for each in compared
    ]
    throughput = ("tokens/s without", "with", "ratio", "without/without", "CPU ratio")
    columns = ("clients", *throughput, "p95 s without", "with", "ratio", "bar")
    figures = [
        {
            "clients": each.clients,
            "throughput_ratio": each.throughput_ratio,
            "noise": each.noise,
            "cpu_ratio": each.cpu_ratio,
            "latency_ratio": each.latency_ratio,
            "median_ratio": each.median_ratio,
            "by_round": each.by_round,
            "trainer_share": each.learning.trainer_share,
            "spread": each.spread,
            "training_steps": sum(each.steps),
            "slowdown": each.slowdown,
            "without": [vars(turn) for turn in each.first.turns],
            "control": [vars(turn) for turn in each.control.turns],
            "with": [vars(turn) for turn in each.learning.turns],
        }
        for each in compared
    ]
    table = Table(title, (*columns, "trainer's share", "its steps"), rows)
    return Result(title, [table], {**facts, "loads": figures})
