"""`paceline tune`: the method, length and shape of drafts with the most tokens per second on a workload.

Candidates are compared on every second prompt. The best of many is partly the best by chance, so its gain
is measured again on the other prompts, and that gain is reported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.run.contest import SpeculationOptions, run_contest
from paceline.bench.run.rows import Row
from paceline.bench.run.speculation import OFF
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.workloads import Workload
from paceline.build import LoadedModel
from paceline.draft.methods import AUTO, find_method
from paceline.draft.speculative_config import parse_speculative_config
from paceline.errors import ConfigError

Config = Mapping[str, Any]  # a speculative_config

MIN_PROMPTS = 4  # with fewer there is nothing to choose by and to tell the gain by
ENOUGH_PROMPTS = 40  # with fewer the advice says how sure it is not


@dataclass(frozen=True)
class Tuning:
    """The result of tuning."""

    model: str
    search: list[Row]  # all candidates, on the prompts used for the search
    best: Config  # the candidate with the most tokens per second
    proof: Row  # the best candidate, on the other prompts
    identical: bool  # no candidate changed a token

    @property
    def tried(self) -> list[str]:
        """The names of the methods that were compared with plain decoding."""
        return list(dict.fromkeys(json.loads(row.method)["method"] for row in self.search[1:]))

    @property
    def chosen(self) -> Config | str:
        """The configuration to use: the best candidate, or "off" if it did not gain on the other prompts."""
        return self.best if (self.proof.speedup_vs_off or 0) > 1 else OFF


def candidates(methods: Sequence[str], lengths: Sequence[int], branchings: Sequence[int]) -> list[Config]:
    """Every method (named as in --methods) with every length and, if it can branch, every branching.

    `auto` is one candidate.
    """
    configs: list[Config] = []
    for method in methods:
        speculation = parse_speculative_config(method)
        if speculation.auto:  # it chooses lengths and shapes itself
            configs.append({"method": AUTO})
            continue
        if len(speculation.drafters) != 1:
            raise ConfigError(f"--methods {method!r} is nothing to tune: name methods such as ngram.")
        argument = method.partition(":")[2]
        name = next(iter(speculation.drafters))
        base: dict[str, Any] = {"method": name}
        row = find_method(name)
        assert row is not None
        option = row.argument
        if argument and option is not None:
            base[option.option] = option.read(argument)
        for length in lengths:
            for branching in branchings:
                if branching == 1:
                    configs.append({**base, "num_speculative_tokens": length})
                elif row.trees and branching < length:
                    configs.append({**base, "num_speculative_tokens": length, "branching": branching})
    return configs


def tune(
    options: SpeculationOptions,
    configs: Sequence[Config],
    on_turn: OnTurn = lambda _: None,
    model: LoadedModel | None = None,
) -> Tuning:
    """The best candidate for these workloads and this profile, and what it gains.

    Measured around a loaded model, or the one that the options name.
    """
    prompts = [prompt for workload in options.workloads for prompt in workload.prompts]
    if len(prompts) < MIN_PROMPTS:
        raise ConfigError(
            f"{len(prompts)} prompts are too few to tune by: half of them choose, the others tell the gain. "
            f"Give at least {MIN_PROMPTS} with --data, better {ENOUGH_PROMPTS}."
        )
    labelled = {json.dumps(config): config for config in configs}
    searching = replace(
        options,
        workloads=(Workload("search", tuple(prompts[::2])),),
        methods={OFF: OFF, **{label: label for label in labelled}},
    )
    search = run_contest(searching, on_turn, model)
    rows = search.rows[-len(searching.methods) :]  # over all segments
    quickest = max(rows[1:], key=lambda row: row.tokens_per_second)
    proving = replace(
        options,
        workloads=(Workload("proof", tuple(prompts[1::2])),),
        methods={OFF: OFF, quickest.method: quickest.method},
    )
    proof = run_contest(proving, on_turn, model)
    return Tuning(
        model=options.model,
        search=rows,
        best=labelled[quickest.method],
        proof=proof.rows[-1],
        identical=search.identical and proof.identical,
    )
