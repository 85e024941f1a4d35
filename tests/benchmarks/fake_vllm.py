"""Stands in for vllm: always says 7, and counts two drafts and three accepted tokens for each answer."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

__version__ = "0.0.fake"


class SamplingParams:
    def __init__(self, **options: Any) -> None:
        self.max_tokens = options["max_tokens"]


class LLM:
    def __init__(self, model: str, **options: Any) -> None:
        head = options["speculative_config"]["model"]
        received = {
            **options["speculative_config"],
            "dtype": options["dtype"],
            "files": sorted(os.listdir(head)),
        }
        with open(os.environ["FAKE_VLLM_LOG"], "w") as file:
            json.dump(received, file)
        self._answers = 0

    def generate(self, prompt: Any, params: SamplingParams, use_tqdm: bool) -> list[Any]:
        self._answers += 1
        output = SimpleNamespace(token_ids=[7] * params.max_tokens)
        return [SimpleNamespace(outputs=[output], metrics=SimpleNamespace(first_token_latency=0.0))]

    def get_metrics(self) -> list[Any]:
        counts = {
            "vllm:spec_decode_num_drafts": 2,
            "vllm:prompt_tokens": 9,
        }
        found = [SimpleNamespace(name=name, value=count * self._answers) for name, count in counts.items()]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        by_depth = SimpleNamespace(name=name, values=[count * self._answers for count in (2, 1, 0)])
        return [*found, by_depth, SimpleNamespace(name="vllm:histogram", buckets={})]
