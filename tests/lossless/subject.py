"""Requests, engines and comparisons: what the lossless tests and the sweep have in common.

The truth about a request is what an engine without drafters gives it when it is alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.build import LoadedModel, build_engine
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.medusa import MedusaCheckpoint, MedusaConfig, write_medusa
from paceline.models.registry import load_checkpoint, resolve

# every option of sampling is somewhere; ids of the bias are frequent tokens of any byte-level vocabulary
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T 0": {"temperature": 0},
    "T 0, penalties, bias": {
        "temperature": 0,
        "repetition_penalty": 1.15,
        "frequency_penalty": 0.3,
        "logit_bias": {28: 1.5, 198: -1.0, 253: 2.0},
        "bad_words": ["the", "of", "is a", "in the"],
    },
    "T 0, stop strings": {"temperature": 0, "stop": ["\n\n", " and ", "```"], "min_tokens": 3},
    "T 0.7, top_k, top_p": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": 1, "prompt_logprobs": 1},
    "T 0.7, penalties": {
        "temperature": 0.7,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
        "seed": 2,
    },
    "T 1, n 2": {"temperature": 1.0, "n": 2, "seed": 3},
    "T 1, min_p, bias": {"temperature": 1.0, "min_p": 0.05, "logit_bias": {28: -3.0, 198: 2.0}, "seed": 4},
    "T 1, top_p, min_tokens, allowed ids": {
        "temperature": 1.0,
        "top_p": 0.8,
        "min_tokens": 16,
        "allowed_token_ids": range(4000),
        "bad_words": ["and", "to the"],
        "seed": 5,
    },
}

MEDUSA_TOKENS = 2048  # of untrained heads: the most frequent ones have low ids

# chains and trees of every method; what is left out is the method's default
PLANS: dict[str, Any] = {
    "ngram": "ngram",
    "suffix": "suffix",
    "suffix tree": {"method": "suffix", "num_speculative_tokens": 12, "branching": 3},
    "draft_model": "draft_model",
    "draft_model tree": {
        "method": "draft_model",
        "num_speculative_tokens": 6,
        "branching": 2,
        "depth": 3,
    },
    "hybrid": "hybrid",
    "hybrid tree": {"method": "hybrid", "num_speculative_tokens": 12, "branching": 3},
    "eagle3": "eagle3",
    "eagle3 tree": {"method": "eagle3", "num_speculative_tokens": 9, "branching": 3, "depth": 4},
    "medusa": "medusa",
    "medusa tree": {"method": "medusa", "num_speculative_tokens": 9, "branching": 3},
    "layerskip tree": {"method": "layerskip", "num_speculative_tokens": 6, "branching": 3, "depth": 2},
    "off": "off",
}

Configs = dict[str, dict[str, Any]]  # a speculative_config for each method


def drafters(draft_model: str | None, medusa: str | None = None) -> Configs:
    """A speculative_config for each method; of eagle3, the head that is shipped for the target.

    The draft model is quantized otherwise than the target: it errs.
    """
    draft = {"method": "draft_model", "model": draft_model, "quantization": "int8"}
    fallback = {"method": "ngram"} if draft_model is None else draft
    configs: Configs = {
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
        "hybrid": {"method": "hybrid", "fallback": fallback, "combine": "tree"},
        "eagle3": {"method": "eagle3"},
        "layerskip": {"method": "layerskip", "exit_layer": 20},  # so many that some guesses are right
    }
    if draft_model is not None:
        configs["draft_model"] = draft
    if medusa is not None:
        configs["medusa"] = {"method": "medusa", "model": medusa}
    return configs


def write_untrained_medusa(model: str, folder: Path) -> None:
    """Medusa heads that all guess the target's next token: right where the same token repeats."""
    checkpoint = load_checkpoint(resolve(model))
    ids = np.arange(MEDUSA_TOKENS, dtype=np.int32)
    scores = encode(checkpoint.tensors["model.embed_tokens.weight"].float32()[ids])
    config = MedusaConfig(3, 0, checkpoint.config.hidden_size, len(ids))
    tensors = {name: scores for name, _ in config.expected_tensors()}
    write_medusa(MedusaCheckpoint(config, tensors, ids, folder), folder)


def make_engine(
    name: str, model: LoadedModel, configs: Iterable[dict[str, Any]] = (), **options: Any
) -> Engine:
    """An engine around a loaded model, with these drafters, of which models have as many threads."""
    options.setdefault("threads", getattr(model.backend, "threads", None))
    config = EngineConfig.from_options(model=name, speculative_config=list(configs) or "off", **options)
    return build_engine(config, model).engine


@dataclass(frozen=True)
class Case:
    """A prompt with one way of sampling."""

    name: str
    prompt: tuple[int, ...]
    sampling: str  # of SAMPLINGS
    max_tokens: int

    def params(self, plan: Any) -> SamplingParams:
        options = {"max_tokens": self.max_tokens, "logprobs": 2, **SAMPLINGS[self.sampling]}
        return SamplingParams(speculative=plan, **options)


@dataclass
class Outcome:
    """The results of the n requests of a case."""

    children: list[Request] = field(default_factory=list)

    def bytes(self) -> list[tuple[Any, ...]]:
        """Everything a user sees of each of the n outputs; equal bytes compare equal."""
        return [
            (
                child.detokenizer.text,
                child.output_token_ids,
                child.logprobs,
                child.finish_reason,
                child.stop_reason,
                child.prompt_logprobs,
                child.error,
            )
            for child in self.children
        ]

    def count(self, name: str) -> int:
        """One of the speculative counts, over the n outputs."""
        return sum(getattr(child.speculative, name) for child in self.children)


def run(engine: Engine, cases: Sequence[Case], plans: Sequence[Any], steps_between: int = 0) -> list[Outcome]:
    """The outcomes of cases that arrive together, or some steps after each other."""
    outcomes = []
    for case, plan in zip(cases, plans, strict=True):
        outcomes.append(Outcome(engine.add_request(case.prompt, case.params(plan))))
        for _ in range(steps_between):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    assert engine.kv.pages.num_available == engine.kv.pages.num_pages, "pages leaked"
    return outcomes


class Truth:
    """Every case alone, without speculation, each computed once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[Case, list[tuple[Any, ...]]] = {}

    def of(self, case: Case) -> list[tuple[Any, ...]]:
        if case not in self._known:
            (outcome,) = run(self._engine, [case], [None])
            self._known[case] = outcome.bytes()
        return self._known[case]

    def differences(self, cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[str]:
        """The names of the cases whose bytes are not the truth's."""
        return [
            f"{case.name} ({case.sampling})"
            for case, outcome in zip(cases, outcomes, strict=True)
            if outcome.bytes() != self.of(case)
        ]
