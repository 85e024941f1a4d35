"""The same promise on real workloads: `python -m tests.lossless.sweep MODEL FILE... --limit N`.

Every prompt of every file is run with speculation off, alone; then with every method, as chain and as
tree, alone, and in mixed batches of eight that join at different steps. Ways of sampling rotate over the
prompts, so that every method gets each of them. Prints what was compared, and ends with status 1 if one byte
differed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.traffic.workloads import load_workload
from paceline.build import LoadedModel, load_model
from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from tests.lossless.subject import PLANS, SAMPLINGS, Case, Outcome, Truth, drafters, make_engine, run

BATCH = 8
MIXED = "mixed batch of 8"


@dataclass
class Count:
    """What was compared for one file and one method."""

    cases: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    differing: list[str] = field(default_factory=list)
    failed_drafters: set[str] = field(default_factory=set)

    def add(self, cases: Sequence[Case], outcomes: Sequence[Outcome], truth: Truth) -> None:
        self.cases += len(cases)
        self.differing += truth.differences(cases, outcomes)
        for outcome in outcomes:
            self.tokens += sum(child.num_output for child in outcome.children)
            self.drafted += outcome.count("num_draft_tokens")
            self.accepted += outcome.count("num_accepted_draft_tokens")
            for child in outcome.children:
                self.failed_drafters |= child.failed_drafters


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    model = load_model(EngineConfig.from_options(model=options.model, threads=options.threads))
    known = drafters(options.draft_model, options.medusa)
    configs = {name: config for name, config in known.items() if name in options.methods}
    plans = {name: plan for name, plan in PLANS.items() if _method(name) in configs}
    truth = Truth(make_engine(options.model, model, enable_prefix_caching=False))

    def fresh() -> Engine:
        return make_engine(options.model, model, configs.values())

    counts: dict[tuple[str, str], Count] = {}
    start = time.perf_counter()
    for file in options.files:
        workload, cases = _cases(file, model, options)
        for name, count in _sweep(cases, plans, fresh, truth, options.samplings):
            counts[workload, name] = count
            seconds = time.perf_counter() - start
            print(f"{seconds:6.0f} s {workload}, {name}: {count.cases} cases", file=sys.stderr, flush=True)
    _show(options.model, counts)
    return 1 if any(count.differing or count.failed_drafters for count in counts.values()) else 0


def _sweep(
    cases: Sequence[Case],
    plans: dict[str, Any],
    fresh: Callable[[], Engine],
    truth: Truth,
    samplings: int,
) -> Iterator[tuple[str, Count]]:
    """The counts of each plan, alone, and of mixed batches."""
    engine = fresh()  # for the whole file: its caches fill, as a server's do
    for number, (name, plan) in enumerate(plans.items()):
        count = Count()
        for place, case in enumerate(cases):
            for turn in range(samplings):
                sampled = _resampled(case, number + place + turn)
                count.add([sampled], run(engine, [sampled], [plan]), truth)
        yield name, count
    count = Count()
    whole = -(-len(cases) // BATCH) * BATCH  # the last batch is filled with prompts from the start
    members = [_resampled(case, place) for place, case in enumerate(islice(cycle(cases), whole))]
    everyone = [*plans.values(), "off"]
    for turn in range(whole // BATCH):
        batch = members[turn * BATCH : (turn + 1) * BATCH]
        own = list(islice(cycle(everyone), turn, turn + BATCH))  # methods change places
        count.add(batch, run(engine, batch, own, steps_between=turn % 3), truth)
    yield MIXED, count
    engine.close()


def _resampled(case: Case, number: int) -> Case:
    sampling = list(SAMPLINGS)[number % len(SAMPLINGS)]
    return Case(case.name, case.prompt, sampling, case.max_tokens)


def _cases(file: str, model: LoadedModel, options: argparse.Namespace) -> tuple[str, list[Case]]:
    workload = load_workload(file, options.limit, options.max_tokens)
    return workload.name, [
        Case(prompt.id, tuple(prompt.token_ids(model.tokenizer)), "T 0", prompt.max_tokens)
        for prompt in workload.prompts
    ]


def _method(plan: str) -> str:
    return plan.removesuffix(" tree")


def _show(model: str, counts: dict[tuple[str, str], Count]) -> None:
    table = Table(title=f"{model}: text, ids, log-probabilities and reasons to end, against speculation off")
    for heading in ("workload", "method", "cases", "tokens", "drafted", "accepted", "differing"):
        table.add_column(heading, justify="left" if heading in ("workload", "method") else "right")
    for (workload, name), count in counts.items():
        numbers = (count.cases, count.tokens, count.drafted, count.accepted, len(count.differing))
        table.add_row(
            workload, name, *(f"{number:,}" for number in numbers), style="red" if count.differing else None
        )
    console = Console(width=110)
    console.print(table)
    cases, differing = (
        sum(count.cases for count in counts.values()),
        [name for count in counts.values() for name in count.differing],
    )
    console.print(f"{cases:,} comparisons, {len(differing)} differ: {', '.join(differing[:20]) or 'none'}")
    for (workload, name), count in counts.items():
        if count.failed_drafters:
            console.print(f"{workload}, {name}: {', '.join(count.failed_drafters)} failed on the way")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lossless.sweep", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", help="workloads: files of JSON lines, or names of built-in ones")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer, at most")
    parser.add_argument("--samplings", type=int, default=1, help="for each prompt and method")
    parser.add_argument(
        "--methods",
        default="ngram,suffix,hybrid,draft_model,layerskip,eagle3,medusa",
        help="with commas between",
    )
    parser.add_argument("--draft-model", help="of draft_model and hybrid; without it there is no draft_model")
    parser.add_argument("--medusa", help="Medusa heads; without them there is no medusa")
    parser.add_argument("--threads", type=int, help="one for each core if not given")
    options = parser.parse_args(arguments)
    options.methods = options.methods.split(",")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
