"""`python -m benchmarks same-bytes MODEL`: does a request get the same tokens alone and in a batch?

The outputs of one request at a time without drafting are the reference. They are compared with every
other way of running the same requests: concurrently, with drafts, greedy and sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.run.speculation import OFF, parse_methods
from paceline.bench.traffic.profiles import closed
from paceline.bench.traffic.workloads import Prompt
from paceline.build import build_engine, load_model
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams

KV_BYTES = 8 << 30  # enough for all requests, and small enough for several engines


@dataclass(frozen=True)
class Sameness:
    """One way to run all requests, and the differences from the reference."""

    draft: str
    temperature: float
    at_once: int
    answers: int
    differing: int  # answers
    first: int | None  # index of the first token that differs

    @property
    def share(self) -> float:
        return self.differing / self.answers


def compare_bytes(
    model: str,
    prompts: Sequence[Prompt],
    drafts: Sequence[str],
    at_once: Sequence[int],
    temperatures: Sequence[float],
    backend: str,
    quantization: str,
    on_line: Callable[[Sameness], None],
    finds_prefixes: bool = False,
) -> list[Sameness]:
    """How many answers differ, by draft, concurrency and temperature.

    The first line of each temperature is the reference. Without `finds_prefixes`, prefix caching is off, so
    that every prompt is computed anew, in other batches.
    """
    counts = sorted({1, *at_once})

    def config(draft: str) -> EngineConfig:
        return EngineConfig.from_options(
            model=model,
            backend=backend,
            device="cuda" if backend == "cuda" else "cpu",
            quantization=quantization,
            max_num_seqs=counts[-1],
            kv_cache_memory_bytes=KV_BYTES,
            enable_prefix_caching=finds_prefixes,
            speculative_config=draft,
        )

    loaded = load_model(config(OFF))
    ids = [prompt.token_ids(loaded.tokenizer) for prompt in prompts]
    alone: dict[float, list[list[int]]] = {}
    lines: list[Sameness] = []
    for label, draft in parse_methods(drafts).items():
        runner = EngineRunner(build_engine(config(draft), loaded).engine)
        for count in counts:
            for temperature in temperatures:
                answers = runner.run(_tasks(prompts, ids, temperature), closed(count)).answers
                tokens = [answer.token_ids for answer in answers]
                expected = alone.setdefault(temperature, tokens)
                lines.append(_compared(label, temperature, count, tokens, expected))
                on_line(lines[-1])
        runner.close()
    return lines


def _tasks(prompts: Sequence[Prompt], ids: Sequence[list[int]], temperature: float) -> list[Task]:
    """The requests, each with its own seed."""
    return [
        Task(
            prompt.id,
            prompt.segment,
            own,
            SamplingParams(temperature=temperature, seed=seed, max_tokens=prompt.max_tokens),
        )
        for seed, (prompt, own) in enumerate(zip(prompts, ids, strict=True))
    ]


def _compared(
    draft: str, temperature: float, at_once: int, answers: Sequence[list[int]], expected: Sequence[list[int]]
) -> Sameness:
    differing = [
        (ours, reference) for ours, reference in zip(answers, expected, strict=True) if ours != reference
    ]
    first_differences = [
        next(
            (index for index, (left, right) in enumerate(zip(*both, strict=False)) if left != right),
            min(map(len, both)),
        )
        for both in differing
    ]
    return Sameness(
        draft, temperature, at_once, len(answers), len(differing), min(first_differences, default=None)
    )
