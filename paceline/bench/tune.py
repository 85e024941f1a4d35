"""`paceline tune`: which method, length and shape of drafts gives the most tokens per second on a workload.

Candidates are compared on every second prompt. The best of many is best partly by luck, so what it gains
is measured again, on the other prompts, and that is what is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from paceline.bench.contest import SpeculationOptions, run_contest
from paceline.bench.speculation import OFF
from paceline.bench.speculation_rows import Row
from paceline.bench.timing import OnTurn
from paceline.bench.wording import shown, with_interval
from paceline.bench.workloads import Workload
from paceline.draft.methods import METHODS, parse_speculative_config
from paceline.errors import ConfigError

# what SGLang calls the methods that it has too
SGLANG_NAMES = {"ngram": "NGRAM", "eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE"}
VLLM_METHODS = ("ngram", "suffix", "eagle", "eagle3", "medusa", "draft_model")

Config = Mapping[str, Any]  # a speculative_config


@dataclass(frozen=True)
class Tuning:
    """What was found."""

    model: str
    search: list[Row]  # of all candidates, on the prompts that chose
    best: Config  # of the candidates, by tokens per second
    proof: Row  # of the best one, on the other prompts
    identical: bool  # no candidate changed a token

    @property
    def chosen(self) -> Config | str:
        """What to use: the best candidate, or off where it did not gain on the other prompts either."""
        return self.best if (self.proof.speedup_vs_off or 0) > 1 else OFF


def candidates(methods: Sequence[str], lengths: Sequence[int], branchings: Sequence[int]) -> list[Config]:
    """Every method, named as --methods names it, with every length and, where it can branch, every shape."""
    found: list[Config] = []
    for method in methods:
        speculation = parse_speculative_config(method)
        if len(speculation.drafters) != 1:
            raise ConfigError(f"--methods {method!r} is nothing to tune: name methods such as ngram.")
        argument = method.partition(":")[2]
        own = next(iter(speculation.drafters))
        base: dict[str, Any] = {"method": own}
        option = METHODS[own].argument
        if argument and option is not None:
            base[option.option] = option.read(argument)
        for length in lengths:
            for branching in branchings:
                if branching == 1:
                    found.append({**base, "num_speculative_tokens": length})
                elif METHODS[own].trees and branching < length:
                    found.append({**base, "num_speculative_tokens": length, "branching": branching})
    return found


def tune(options: SpeculationOptions, configs: Sequence[Config], on_turn: OnTurn = lambda _: None) -> Tuning:
    """The best of the candidates for these workloads and this profile, and what it gains."""
    prompts = [prompt for workload in options.workloads for prompt in workload.prompts]
    if len(prompts) < 4:
        raise ConfigError(
            f"{len(prompts)} prompts are too few to tune by: half of them choose, the others tell the gain. "
            "Give at least 4, better 40."
        )
    labelled = {json.dumps(config): config for config in configs}
    searching = replace(
        options,
        workloads=(Workload("search", tuple(prompts[::2])),),
        methods={OFF: OFF, **{label: label for label in labelled}},
    )
    search = run_contest(searching, on_turn)
    rows = search.rows[-len(searching.methods) :]  # of all segments together
    quickest = max(rows[1:], key=lambda row: row.tokens_per_second)
    proving = replace(
        options,
        workloads=(Workload("proof", tuple(prompts[1::2])),),
        methods={OFF: OFF, quickest.method: quickest.method},
    )
    proof = run_contest(proving, on_turn)
    return Tuning(
        model=options.model,
        search=rows,
        best=labelled[quickest.method],
        proof=proof.rows[-1],
        identical=search.identical and proof.identical,
    )


def tune_table(tuning: Tuning) -> Table:
    """All candidates, the quickest first."""
    table = Table(title=f"{tuning.model}: candidates on the prompts that choose", title_justify="left")
    table.add_column("speculative_config")
    for heading in ("tok/s", "speedup (95 %)", "length"):
        table.add_column(heading, justify="right")
    for row in sorted(tuning.search, key=lambda row: -row.tokens_per_second):
        length = "" if row.method == OFF else shown(row.mean_acceptance_length, ".2f")
        table.add_row(row.method, f"{row.tokens_per_second:,.0f}", with_interval(row), length)
    return table


def vllm_flags(config: Config | str) -> str | None:
    """The same for `vllm serve`; None if it cannot do that."""
    if isinstance(config, str):
        return ""
    if config["method"] not in VLLM_METHODS or config.get("branching", 1) > 1:
        return None
    return f"--speculative-config '{json.dumps(config)}'"


def sglang_flags(config: Config | str) -> str | None:
    """The same for SGLang's server; None if it cannot do that."""
    if isinstance(config, str):
        return ""
    name = SGLANG_NAMES.get(config["method"])
    if name is None:
        return None
    length, branching = config["num_speculative_tokens"], config.get("branching", 1)
    flags = [f"--speculative-algorithm {name}", f"--speculative-num-draft-tokens {length + 1}"]
    if config["method"] != "ngram":
        flags += [
            f"--speculative-draft-model-path {config.get('model', 'HEAD')}",
            f"--speculative-num-steps {length if branching == 1 else -(-length // branching)}",
            f"--speculative-eagle-topk {branching}",
        ]
    return " ".join(flags)


def advice(tuning: Tuning) -> list[str]:
    """What to do, and what it is expected to give, a line each."""
    proof, chosen = tuning.proof, tuning.chosen
    interval = proof.speedup_interval
    between = "" if interval is None else f", 95 % confidence {interval[0]:.2f} to {interval[1]:.2f}"
    lines = [
        f"best of {len(tuning.search) - 1} by tokens per second: {json.dumps(tuning.best)}",
        f"expected gain, on {proof.prompts} prompts that did not choose it: {proof.speedup_vs_off or 0:.2f} "
        f"times as fast as off{between}",
    ]
    if chosen == OFF:
        return [*lines, f"No gain: leave drafting off. paceline serve {tuning.model} --draft off"]
    if interval is not None and interval[0] < 1:
        lines.append("That it gains at all is not sure: measure with more prompts or rounds.")
    lines.append(f"paceline: paceline serve {tuning.model} --speculative-config '{json.dumps(chosen)}'")
    for engine, flags in (("vLLM", vllm_flags(chosen)), ("SGLang", sglang_flags(chosen))):
        lines.append(f"{engine}: {'it has no such drafts' if flags is None else flags}")
    return [
        *lines,
        "What is best here need not be best there: measure other servers by `paceline bench --endpoint`.",
    ]
