"""Costs of a step's parts in seconds: measured, or computed from a machine's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np

from paceline.control.cost import Float64Array, StepCosts
from paceline.errors import ConfigError

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 64)  # row counts that an engine times when it starts
OUTLIER = 3.0  # times the expected duration: longer samples are cut to this
LONG = 1024  # tokens of the context that it compares with an empty one


@dataclass(frozen=True, slots=True)
class PassSize:
    """The size of a pass."""

    rows: int
    requests: int
    logits: int  # rows whose logits are needed
    contexts: int  # committed tokens, summed over requests
    keys: int  # read by attention, summed over rows

    @property
    def has_prompts(self) -> bool:
        return self.rows > self.logits

    @staticmethod
    def chain(rows: int, context: int = 0) -> PassSize:
        """One request's chain, all of it verified."""
        keys = rows * context + rows * (rows + 1) // 2
        return PassSize(rows, 1, rows, context, keys)


@dataclass(frozen=True, slots=True)
class Call:
    """The size of a drafter's call."""

    drafter: str
    requests: int
    levels: int  # of the deepest draft
    nodes: int  # of all drafts


class CostModel(Protocol):
    """Seconds of the parts of a step."""

    def pass_seconds(self, size: PassSize) -> float:
        """Seconds of the target's pass."""
        ...

    def overhead_seconds(self, size: PassSize) -> float:
        """Seconds of everything else except drafters."""
        ...

    def draft_seconds(self, call: Call) -> float:
        """Seconds of a drafter's call."""
        ...


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """Seconds that a server adds to its engine's: the first two before a request is queued, the others to
    every pass."""

    request: float = 0.0
    prompt_token: float = 0.0  # per token of the prompt, cached or not
    step: float = 0.0  # per pass
    token: float = 0.0  # per request of a pass: each gets a token
    row: float = 0.0  # per prompt token that a pass computes: a server's caches are not those of a loop

    @staticmethod
    def parse(text: str) -> ServerCosts:
        """The costs of a text such as request=15,step=0.5, in milliseconds."""
        names, costs = [item.name for item in fields(ServerCosts)], {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                costs[name] = float(value) / 1e3
            except ValueError:
                costs[name] = -1.0
            if name not in names or not costs[name] >= 0:
                raise ConfigError(
                    "--server must be milliseconds, such as request=15,step=0.5, with the names "
                    f"{', '.join(names)}; got {text!r}."
                )
        return ServerCosts(**costs)

    def __str__(self) -> str:
        values = [(item.name, 1e3 * getattr(self, item.name)) for item in fields(self)]
        return ",".join(f"{name}={value:.3g}" for name, value in values)

    def arrival_seconds(self, prompt_tokens: int) -> float:
        """From the arrival of a request to its place in the queue."""
        return self.request + self.prompt_token * prompt_tokens


@dataclass(frozen=True, slots=True)
class Contention:
    """Factors on the seconds of a step while another replica of the same machine computes."""

    prompts: float = 1.0  # of passes with prompts: they compute
    decoding: float = 1.0  # of others: they read memory, which replicas share


@dataclass(frozen=True, slots=True)
class ServedCosts:
    """Costs of an engine within a server, on a machine that it may share."""

    engine: CostModel
    server: ServerCosts
    contention: Contention
    crowded: Callable[[], bool]  # whether another replica computes now

    def pass_seconds(self, size: PassSize) -> float:
        return self._factor(size.has_prompts) * self.engine.pass_seconds(size)

    def overhead_seconds(self, size: PassSize) -> float:
        server = self.server
        added = server.step + server.token * size.requests + server.row * (size.rows - size.logits)
        return self._factor(size.has_prompts) * (self.engine.overhead_seconds(size) + added)

    def draft_seconds(self, call: Call) -> float:
        return self._factor(False) * self.engine.draft_seconds(call)

    def _factor(self, has_prompts: bool) -> float:
        if not self.crowded():
            return 1.0
        return self.contention.prompts if has_prompts else self.contention.decoding


def start_costs(costs: CostModel, max_rows: int) -> StepCosts:
    """The step costs that a controller would measure when it starts."""
    rows = [count for count in ROWS if count <= max(2, max_rows)]
    seconds = [costs.pass_seconds(PassSize.chain(count)) for count in rows]
    max_measured = rows[-1]
    longer = costs.pass_seconds(PassSize.chain(max_measured, LONG)) - seconds[-1]
    return StepCosts(rows, seconds, max(0.0, longer) / (max_measured * LONG))


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs measured here, for one drafting method."""

    verified: StepCosts  # of passes that need the logits of every row
    prompts: StepCosts  # of passes that need the logits of one row
    per_key: float  # seconds per key that a row reads
    per_context: float  # seconds per committed token of a request
    scale: float = 1.0  # factor on all of these, in passes without prompts
    prompt_scale: float = 1.0  # the same in passes with prompts
    overhead: Sequence[float] = (0.0, 0.0)  # [terms] costs of `overhead_terms`
    drafts: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by drafter, [terms] of `call_terms`

    def pass_seconds(self, size: PassSize) -> float:
        rows = float(self.prompts.seconds(size.rows, 0.0))
        logits = float(self.verified.seconds(size.logits, 0.0) - self.prompts.seconds(size.logits, 0.0))
        read = self.per_key * size.keys + self.per_context * size.contexts
        scale = self.prompt_scale if size.has_prompts else self.scale
        return scale * (rows + max(0.0, logits) + read)

    def overhead_seconds(self, size: PassSize) -> float:
        return float(np.dot(overhead_terms(size), self.overhead))

    def draft_seconds(self, call: Call) -> float:
        return float(np.dot(call_terms(call), self.drafts[call.drafter]))


def overhead_terms(size: PassSize) -> tuple[float, ...]:
    """What overhead grows with: the step and its requests."""
    return 1.0, size.requests


def call_terms(call: Call) -> tuple[float, ...]:
    """What a drafter's call grows with: the call, its requests, levels and nodes."""
    return 1.0, call.requests, call.levels, call.nodes


def fit(terms: Float64Array, seconds: Float64Array) -> list[float]:
    """[terms] non-negative costs whose products with `terms` [samples, terms] best fit `seconds` [samples].

    Errors are relative to the expected duration, so that short samples count as much as long ones.
    """
    usual = np.median(seconds)
    expected = terms @ nonnegative_fit(terms, seconds, np.maximum(seconds, 0.1 * usual))
    expected = np.maximum(expected, 0.1 * usual)
    costs: list[float] = nonnegative_fit(terms, np.minimum(seconds, OUTLIER * expected), expected).tolist()
    return costs


def nonnegative_fit(terms: Float64Array, seconds: Float64Array, scale: Float64Array) -> Float64Array:
    """[terms] non-negative least squares of errors in units of `scale` [samples]: the most negative cost
    is set to 0 until none is left."""
    costs = np.zeros(terms.shape[1])
    active = list(range(terms.shape[1]))
    while active:
        solution = np.linalg.lstsq(terms[:, active] / scale[:, None], seconds / scale, rcond=None)[0]
        if solution.min() >= 0.0:
            costs[active] = solution
            break
        del active[int(solution.argmin())]
    return costs
