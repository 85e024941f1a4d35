"""What a head gains in the engine: tokens per pass of the target, compared with other drafters."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.params import SamplingParams
from paceline.engine.outputs import RequestOutput
from paceline.llm import LLM
from paceline.train.data.examples import Examples
from paceline.train.loop.batches import Indices
from paceline.train.objectives.objective import NEW

DRAFTED = 5  # tokens of a chain
TREE_NODES, TREE_BRANCHING = 16, 4  # nodes and children per node of a tree of the same depth
MAX_TOKENS = 128  # per answer
AT_ONCE = 8  # prompts that are answered together


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt that the head was not trained on."""

    segment: str
    token_ids: list[int]


def held_out_prompts(examples: Examples, held_out: Indices, number: int, seed: int) -> list[HeldOutPrompt]:
    """At most `number` of the held-out prompts."""
    firsts = {int(examples.prompts[index]): int(index) for index in reversed(held_out)}
    chosen = random.Random(seed).sample(sorted(firsts.values()), min(number, len(firsts)))
    return [
        HeldOutPrompt(examples.segments[index], examples.ids(index)[: examples.answers[index]].tolist())
        for index in sorted(chosen)
    ]


def contestants(method: str, head: Path, before: Path, start: str) -> dict[str, dict[str, Any]]:
    """Speculative configurations to compare, by their label in the table.

    `before` is the head before training, which started from `start`.
    """
    chain = {"num_speculative_tokens": DRAFTED}
    full = {**chain, "min_prob": 0.0}  # full length, whatever the confidence
    tree = {"num_speculative_tokens": TREE_NODES, "branching": TREE_BRANCHING, "depth": DRAFTED}
    return {
        "this head": {"method": method, "model": str(head), **full},
        f"this head, trees of {TREE_NODES}": {"method": method, "model": str(head), **tree},
        "untrained" if start == NEW else "before": {"method": method, "model": str(before), **full},
        "ngram": {"method": "ngram", **chain},
    }


def tokens_per_pass(
    load: Callable[[dict[str, Any]], LLM],
    prompts: Sequence[HeldOutPrompt],
    methods: Mapping[str, dict[str, Any]],
    max_tokens: int = MAX_TOKENS,
    seconds: float | None = None,
) -> tuple[dict[str, dict[str, float]], int]:
    """Tokens per pass at temperature 0, by method and segment, and of how many of the prompts.

    `load` returns the model with a speculative configuration. Every pass gives one token in addition to
    the accepted ones. With `seconds`, the first method answers prompts for its share of them, the others get
    the same prompts; turns that would begin after the time limit are left out.
    """
    table: dict[str, dict[str, float]] = {}
    last_start = math.inf if seconds is None else time.monotonic() + seconds
    for method, config in methods.items():
        if table and time.monotonic() > last_start:
            break
        share = math.inf if seconds is None or table else seconds / len(methods)
        outputs = _answers(load(config), prompts, max_tokens, share)
        prompts = prompts[: len(outputs)]
        sums: dict[str, list[int]] = {}
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = len(output.outputs[0].token_ids)
            accepted = output.metrics.speculative.num_accepted_draft_tokens
            for segment in (prompt.segment, "all"):
                total = sums.setdefault(segment, [0, 0])
                total[0] += tokens
                total[1] += tokens - accepted
        ordered = sorted(sums, key=lambda segment: (segment == "all", segment))
        table[method] = {segment: sums[segment][0] / max(1, sums[segment][1]) for segment in ordered}
    return table, len(prompts)


def _answers(
    llm: LLM, prompts: Sequence[HeldOutPrompt], max_tokens: int, seconds: float
) -> list[RequestOutput]:
    """Greedy answers to the prompts, or to those that begin in time. Closes the LLM.

    The caller keeps no reference to it: on a GPU its KV cache must be gone before the next engine's is made.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs: list[RequestOutput] = []
    end = time.monotonic() + seconds
    for start in range(0, len(prompts), AT_ONCE):
        if outputs and time.monotonic() > end:
            break
        ids = [prompt.token_ids for prompt in prompts[start : start + AT_ONCE]]
        outputs += llm.generate(ids, params, use_tqdm=False)
    llm.close()
    return outputs
