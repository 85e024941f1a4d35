"""Two useless drafters, with which `auto` must stay within 2 % of plain decoding.

    python -m benchmarks bad-drafters smollm2-135m --concurrency 1,4,16

`wrong` drafts random tokens with high confidence; `slow` copies earlier text, and sleeps 30 ms first. Both
are new to the controller, so the figures include what it costs to find out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.control.grid import NEVER_SLOWER
from paceline.bench.loading import empty_memory
from paceline.bench.report.result import Result, Table
from paceline.bench.report.terminal import progress
from paceline.bench.run.contest import Contest, SpeculationOptions, run_contest
from paceline.bench.run.speculation import OFF
from paceline.bench.run.wording import verdict as verdict_of
from paceline.bench.traffic.builtin_workloads import BUILT_IN
from paceline.bench.traffic.profiles import closed
from paceline.bench.traffic.workloads import load_workload
from paceline.core.request import Request
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter, Target
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.methods import AUTO, METHODS, Method

SURE = 0.95  # confidence that `wrong` reports for each token
SLEEP = 0.03  # seconds
BAD = ("wrong", "slow")
MAX_TOKENS = 96


class WrongDrafter(Drafter):
    """Random tokens, almost always wrong."""

    name = "wrong"

    @dataclass(frozen=True)
    class Options:
        """None."""

    @classmethod
    def load(cls, options: Options, target: Target) -> WrongDrafter:
        return cls(target.config.vocab_size)

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._chance = random.Random(0)

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        chains = [[self._chance.randrange(self._vocab_size) for _ in range(plan.levels)] for plan in plans]
        chances = [[SURE ** (depth + 1) for depth in range(len(line))] for line in chains]
        return DraftTrees.chains(chains, chances)


class SlowDrafter(NgramDrafter):
    """N-gram drafts, after a sleep."""

    name = "slow"

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        time.sleep(SLEEP)
        return super().propose(requests, plans)


def run_bad_drafters(model: str, concurrencies: Sequence[int], prompts: int) -> Contest:
    """`auto` with each of them alone, compared with off, on the built-in workloads."""
    for drafter in (WrongDrafter, SlowDrafter):
        METHODS[drafter.name] = Method(__name__, drafter.__name__, num_speculative_tokens=5, trees=False)
    options = SpeculationOptions(
        workloads=tuple(load_workload(name, prompts, MAX_TOKENS) for name in BUILT_IN),
        methods={OFF: OFF, **{f"{AUTO}, {name}": f"{AUTO},{name}" for name in BAD}},
        model=model,
        rounds=1,
        profiles=tuple(closed(number) for number in concurrencies),
    )
    with empty_memory(), progress(options.num_turns(1 + len(BAD))) as on_turn:
        return run_contest(options, on_turn)


def bad_drafters_result(contest: Contest) -> Result:
    """The throughput of `auto` with each of them, relative to off."""
    title = f"{contest.options.model}: auto with a bad drafter, as a share of off"
    rows = []
    for row in contest.rows:
        if row.method != OFF:
            share = row.speedup_vs_off or 0.0
            verdict = "held" if share >= NEVER_SLOWER else "MISSED"
            rows.append((row.workload, row.profile, row.method, f"{share:.3f}", verdict))
    for name in BAD:
        seconds = {
            method: sum(row.seconds for row in contest.rows if row.method == method)
            for method in (OFF, f"{AUTO}, {name}")
        }
        rows.append(("all", "", f"{AUTO}, {name}", f"{seconds[OFF] / seconds[f'{AUTO}, {name}']:.3f}", ""))
    columns = ("workload", "arrivals", "method", "of off", f"at least {NEVER_SLOWER}")
    table = Table(title, columns, rows, text=("arrivals", "method"))
    return Result(title, [table], contest.facts(), findings=[verdict_of(contest)])
