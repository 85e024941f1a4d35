"""Answers by the engine: the target exactly as it is served."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.params import SamplingParams
from paceline.llm import LLM


class EngineAnswerer:
    """An Answerer around an LLM. Each answer depends only on its prompt and seed."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        max_tokens: int,
    ) -> list[list[int]]:
        """One answer per prompt, including its end-of-sequence token, of at most `max_tokens` tokens."""
        params = [
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
            for temperature, seed in zip(temperatures, seeds, strict=True)
        ]
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
