"""Two drafters that nobody should use, and what `auto` makes of them: it stays within 2 % of plain decoding.

    python examples/bad_drafters.py smollm2-135m 1,4,16

`wrong` drafts tokens by chance and is sure of each; `slow` copies what came before, and sleeps 30 ms over it.
Both are new to the controller, so what it costs to find out is in the figures.
"""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.draft.trees import DraftPlan, DraftTrees
from paceline.engine.request import Request

from paceline.bench.builtin_workloads import BUILT_IN
from paceline.bench.contest import SpeculationOptions, run_contest
from paceline.bench.grid import NEVER_SLOWER, empty_memory
from paceline.bench.profiles import closed
from paceline.bench.tables import progress
from paceline.bench.workloads import load_workload
from paceline.draft.base import Drafter, Target
from paceline.draft.methods import METHODS, Method
from paceline.draft.ngram import NgramDrafter

SURE = 0.95  # what `wrong` says of each token, given those before it
SLEEP = 0.03  # seconds


class WrongDrafter(Drafter):
    """Tokens by chance: wrong but for one in as many as the vocabulary has."""

    name = "wrong"

    @dataclass(frozen=True)
    class Options:
        """None."""

    @classmethod
    def load(cls, options: Options, target: Target) -> "WrongDrafter":
        return cls(target.config.vocab_size)

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._chance = random.Random(0)

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        chains = [[self._chance.randrange(self._vocab_size) for _ in range(plan.levels)] for plan in plans]
        chances = [[SURE ** (depth + 1) for depth in range(len(line))] for line in chains]
        return DraftTrees.chains(chains, chances)


class SlowDrafter(NgramDrafter):
    """Copies, after a nap."""

    name = "slow"

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        time.sleep(SLEEP)
        return super().propose(requests, plans)


def main(model: str = "smollm2-135m", concurrencies: str = "1,4,16", prompts: str = "16") -> None:
    """Print what `auto` gives with each of them, at each concurrency."""
    for drafter in (WrongDrafter, SlowDrafter):
        METHODS[drafter.name] = Method(__name__, drafter.__name__, num_speculative_tokens=5, trees=False)
    bad = ("wrong", "slow")
    options = SpeculationOptions(
        workloads=tuple(load_workload(name, int(prompts), 96) for name in BUILT_IN),
        methods={"off": "off", **{f"auto, {name}": f"auto,{name}" for name in bad}},
        model=model,
        rounds=1,
        profiles=tuple(closed(int(number)) for number in concurrencies.split(",")),
    )
    with empty_memory(), progress(options.num_turns(1 + len(bad))) as on_turn:
        contest = run_contest(options, on_turn)
    for row in contest.rows:
        share = row.speedup_vs_off or 0.0
        if row.method != "off":
            verdict = "held" if share >= NEVER_SLOWER else "MISSED"
            print(f"{row.workload:12} {row.profile:4} {row.method:12} {share:.3f} of off  {verdict}")
    for name in bad:
        own = [row for row in contest.rows if row.method == f"auto, {name}"]
        off = [row for row in contest.rows if row.method == "off"]
        ratio = sum(row.seconds for row in off) / sum(row.seconds for row in own)
        print(f"all together, {name}: {ratio:.3f} of off; outputs identical: {contest.identical}")


if __name__ == "__main__":
    main(*sys.argv[1:])
