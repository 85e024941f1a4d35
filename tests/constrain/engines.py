"""Engines over the toy model with a vocabulary that spells JSON, and constrained requests of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import DraftPlan
from paceline.draft.base import Drafter
from paceline.draft.hybrid import HybridDrafter, HybridOptions
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.lookup.suffix import SuffixDrafter, SuffixOptions
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.verify.rules import RULES
from tests.constrain.walks import GRAMMARS, TOKENIZER
from tests.engines import new_engine
from tests.toy import ToyBackend, drain

VOCAB = TOKENIZER.vocab_size
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logit_bias": {5: 50.0, 300: 100.0}, "frequency_penalty": 1.0},
    {"temperature": 1.0, "min_tokens": 12},
    {"temperature": 1.0, "ignore_eos": True},
    {"temperature": 1.0, "stop": ["b", "rea"]},
    {"temperature": 1.0, "bad_words": ["a", "tr", "1"], "allowed_token_ids": [*range(0, 300, 2)]},
]


def drafters() -> dict[str, Drafter]:
    few = {"suffix_decoding_max_cached_requests": 100}  # memory for more takes longer than the tests
    ngram = NgramDrafter(NgramDrafter.Options(prompt_lookup_max=2, prompt_lookup_min=1))
    hybrid = HybridDrafter(
        HybridOptions(fallback={"method": "ngram"}, combine="tree"),
        SuffixDrafter(SuffixOptions(**few)),
        ngram,
        4,
    )
    return {"ngram": ngram, "suffix": SuffixDrafter(SuffixOptions(**few)), "hybrid": hybrid}


PLANS: dict[str, Any] = {
    "grammar": "grammar",
    "ngram": "ngram",
    "suffix": "suffix",
    "suffix tree": {"method": "suffix", "num_speculative_tokens": 8, "branching": 3, "depth": 4},
    "hybrid tree": {"method": "hybrid", "num_speculative_tokens": 8, "branching": 2},
    "auto": "auto",
    "off": "off",
}


def make_engine(rule: str = "pathwise", backend: ToyBackend | None = None, **options: Any) -> Engine:
    loaded = drafters() if (given := options.pop("drafters", None)) is None else given
    max_rows = options.pop("max_num_batched_tokens", 256)
    max_num_seqs = options.pop("max_num_seqs", 32)
    defaults = {"num_pages": 600, "enable_prefix_caching": True} | options
    return new_engine(
        backend or ToyBackend(max_rows=max_rows, vocab=VOCAB),
        TOKENIZER,
        Limits(VOCAB, 256, max_num_seqs, max_rows, draft_trees=RULES[rule].trees),
        controller=defaults.pop("controller", FixedController()),
        drafters=loaded,
        plans={name: DraftPlan(name, 5) for name in loaded},
        rule=RULES[rule].verify,
        **defaults,
    )


def requests(plan: Any = None, logprobs: int | None = 2) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts that say what the answer may be like, each grammar with several options."""
    for number in range(2 * len(GRAMMARS)):
        options = OPTIONS[number % len(OPTIONS)] | {
            "max_tokens": 16 if number % 2 else 60,
            "logprobs": logprobs,
        }
        words = np.random.default_rng(number).integers(3, VOCAB - 5, 3 + number).tolist()
        example = TOKENIZER.encode('{"name": "triangle_area", "arguments": {"base": 10, "unit": "abc"}} yes')
        structure = list(GRAMMARS.values())[number % len(GRAMMARS)]
        params = {"seed": number, "structured_outputs": structure, "speculative": plan, **options}
        yield [*words, *example], SamplingParams(**params)


def result(request: Request) -> tuple[Any, ...]:
    """All that a user sees."""
    return (
        request.output_token_ids,
        request.finish_reason,
        request.stop_reason,
        request.detokenizer.text,
        request.logprobs,
        str(request.error),
    )


def served(engine: Engine, wanted: Any) -> list[Request]:
    added = [request for ids, params in wanted for request in engine.add_request(ids, params)]
    drain(engine)
    return added
