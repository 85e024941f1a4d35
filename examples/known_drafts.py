"""What drafts for a model are worth, learned on our own workloads: python examples/known_drafts.py MODEL FILE

A controller that has seen nothing begins with such a file where one lies beside a shipped head, as
drafts.json: what drafters said of their chances, what became of it, and what their calls cost, in passes
of the model. What its own traffic shows soon counts for more.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.bench.loading import empty_memory
from paceline.bench.traffic.workloads import BUILT_IN, load_workload
from paceline.home import paceline_home

PROMPTS, TOKENS = 8, 96  # of each workload
DRAFTS = 60  # that all of it counts for
SCENES = 48  # drafts that stand for those to come


def main(model: str, file: str) -> None:
    """Generate as a user would, one request at a time, and keep what the controller learned."""
    said: dict[str, list[list[list[float]]]] = {}  # by drafter: [workloads][drafts][nodes]
    with empty_memory():
        for name in BUILT_IN:
            facts = learned_from(model, name)
            for drafter, own in facts["models"].items():
                said.setdefault(drafter, []).append(own["said"][: SCENES // len(BUILT_IN)])
    models = {name: _shortened(own, _in_turn(said[name])) for name, own in facts["models"].items()}
    calls = {name: [round(price, 5) for price in prices] for name, prices in facts["draft_calls"].items()}
    Path(file).write_text(json.dumps({"draft_calls": calls, "models": models}))


def learned_from(model: str, workload: str) -> Any:
    """What the controller's memory holds after this workload, beside what it held before."""
    llm = LLM(model)
    for prompt, temperature in itertools.product(
        load_workload(workload, PROMPTS, TOKENS).prompts, (0.0, 1.0)
    ):
        params = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=0)
        llm.generate([{"prompt_token_ids": prompt.token_ids(llm.get_tokenizer())}], params)
    llm.close()
    (memory,) = (paceline_home() / "costs").glob("*.json")
    return json.loads(memory.read_text())


def _in_turn(said: list[list[list[float]]]) -> list[list[float]]:
    """The drafts of all workloads, one of each after the other: newer ones count for more."""
    return [draft for together in zip(*said, strict=False) for draft in together]


def _shortened(facts: dict[str, Any], said: list[list[float]]) -> dict[str, Any]:
    share = min(1.0, DRAFTS / facts["drafts"])
    counts = [[round(share * count, 3) for count in line] for line in facts["counts"]]
    drafts = [[round(chance, 3) for chance in own] for own in said]
    return {"drafts": min(DRAFTS, facts["drafts"]), "counts": counts, "said": drafts}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("Name a model and a file to write: python examples/known_drafts.py smollm2-135m drafts.json")
    main(*sys.argv[1:])
