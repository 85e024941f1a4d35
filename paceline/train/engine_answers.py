"""Answers by the engine: the target exactly as it is served."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.params import SamplingParams
from paceline.llm import LLM


class EngineAnswerer:
    """An Answerer over an LLM. Each answer depends on its own prompt and seed alone."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        max_tokens: int,
    ) -> list[list[int]]:
        """An answer to each prompt, up to and with its end-of-sequence token, at most `max_tokens` long."""
        params = [
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
            for temperature, seed in zip(temperatures, seeds, strict=True)
        ]
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
