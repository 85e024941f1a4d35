"""Answers by the engine: the target exactly as it is served."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.llm import LLM
from paceline.train.answers import Next, Watch, patient


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
        watch: Watch = patient,
    ) -> list[list[int] | None]:
        """One answer per prompt, including its end-of-sequence token, of at most `max_tokens` tokens.

        `watch` is asked after every step of the engine.
        """
        engine = self.llm.engine
        requests: list[Request] = []
        answers = tokens = 0
        try:
            for prompt, temperature, seed in zip(prompts, temperatures, seeds, strict=True):
                params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
                requests += engine.add_request(prompt, params)
            after = Next.GO_ON
            while answers < len(requests) and (after := watch(answers, tokens)) is Next.GO_ON:
                for delta in engine.step():
                    tokens += len(delta.token_ids)
                    answers += delta.request.finished
            usable = [request.finished or after is Next.CUT for request in requests]
            return [
                (request.output_token_ids or None) if use else None
                for request, use in zip(requests, usable, strict=True)
            ]
        finally:
            for request in requests:
                engine.abort(request.request_id)
