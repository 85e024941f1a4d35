"""What drafts for a model are worth, learned on our own workloads: python examples/known_drafts.py MODEL FILE

A controller that has seen nothing begins with such a file where one lies beside a shipped head, as
drafts.json: what drafters said of their chances, and what became of it. What its own traffic shows soon
counts for more.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.bench.grid import empty_memory
from paceline.bench.workloads import BUILT_IN, load_workload
from paceline.home import paceline_home

PROMPTS, TOKENS = 8, 96  # of each workload
DRAFTS = 60  # that all of it counts for
SCENES = 48  # drafts that stand for those to come


def main(model: str, file: str) -> None:
    """Generate as a user would, one request at a time, and keep what the controller learned."""
    with empty_memory():
        llm = LLM(model)
        prompts = [prompt for name in BUILT_IN for prompt in load_workload(name, PROMPTS, TOKENS).prompts]
        random.Random(0).shuffle(prompts)  # so that the last ones are of all kinds
        for temperature in (0.0, 1.0):
            for prompt in prompts:
                params = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=0)
                llm.generate([{"prompt_token_ids": prompt.token_ids(llm.get_tokenizer())}], params)
        llm.close()
        (learned,) = (paceline_home() / "costs").glob("*.json")
        models = json.loads(learned.read_text())["models"]
    known = {name: _shortened(facts) for name, facts in models.items()}
    Path(file).write_text(json.dumps({"models": known}))


def _shortened(facts: dict[str, Any]) -> dict[str, Any]:
    share = min(1.0, DRAFTS / facts["drafts"])
    counts = [[round(share * count, 3) for count in line] for line in facts["counts"]]
    said = [[round(chance, 3) for chance in own] for own in facts["said"][:SCENES]]
    return {"drafts": min(DRAFTS, facts["drafts"]), "counts": counts, "said": said}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("Name a model and a file to write: python examples/known_drafts.py smollm2-135m drafts.json")
    main(*sys.argv[1:])
