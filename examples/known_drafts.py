"""Prior knowledge about drafts for a model, from our own workloads.

    python examples/known_drafts.py MODEL FILE [PROMPTS [TOKENS]]       per workload; 8 prompts of 96 tokens

A new controller starts with such a file if one lies beside a shipped head, as drafts.json: the drafters'
confidences, what was accepted, and the cost of their calls in passes of the model. Its own traffic soon
counts for more.
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

DRAFTS = 60  # weight of this knowledge, in drafts
SCENARIOS = 48  # scenarios: drafts that stand for future ones


def main(model: str, file: str, prompts: str = "8", tokens: str = "96") -> None:
    """Generate like a user, one request at a time, and store what the controller learned."""
    drafts_of: dict[str, list[list[list[float]]]] = {}  # by drafter: [workloads][drafts][nodes]
    with empty_memory():
        for name in BUILT_IN:
            facts = learned_from(model, name, int(prompts), int(tokens))
            for drafter, learned in facts["models"].items():
                drafts_of.setdefault(drafter, []).append(learned["said"][: SCENARIOS // len(BUILT_IN)])
    models = {
        name: _shortened(learned, _in_turn(drafts_of[name])) for name, learned in facts["models"].items()
    }
    calls = {name: [round(price, 5) for price in prices] for name, prices in facts["draft_calls"].items()}
    Path(file).write_text(json.dumps({"draft_calls": calls, "models": models}))


def learned_from(model: str, workload: str, prompts: int, tokens: int) -> Any:
    """The controller's memory after this workload, in addition to what it held before."""
    llm = LLM(model)
    for prompt, temperature in itertools.product(
        load_workload(workload, prompts, tokens).prompts, (0.0, 1.0)
    ):
        params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=0)
        llm.generate([{"prompt_token_ids": prompt.token_ids(llm.get_tokenizer())}], params)
    llm.close()
    (memory,) = (paceline_home() / "costs").glob("*.json")
    return json.loads(memory.read_text())


def _in_turn(drafts_by_workload: list[list[list[float]]]) -> list[list[float]]:
    """The drafts of all workloads, interleaved: newer ones count for more."""
    return [draft for together in zip(*drafts_by_workload, strict=False) for draft in together]


def _shortened(facts: dict[str, Any], drafts: list[list[float]]) -> dict[str, Any]:
    share = min(1.0, DRAFTS / facts["drafts"])
    counts = [[round(share * count, 3) for count in line] for line in facts["counts"]]
    drafts = [[round(chance, 3) for chance in draft] for draft in drafts]
    return {"drafts": min(DRAFTS, facts["drafts"]), "counts": counts, "said": drafts}


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4, 5):
        sys.exit("Name a model and a file to write: python examples/known_drafts.py smollm2-135m drafts.json")
    main(*sys.argv[1:])
