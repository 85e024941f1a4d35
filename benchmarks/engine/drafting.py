"""The cost of drafting itself, without a model: time at a long context, and memory of past responses."""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench.simulate.world import CountingTokenizer
from paceline.bench.timing import OnTurn
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import DraftPlan
from paceline.core.verdict import Verdict
from paceline.draft.base import Drafter
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.lookup.suffix import SuffixDrafter
from paceline.draft.methods import METHODS
from paceline.engine.admission import Limits, make_requests
from paceline.errors import ConfigError
from paceline.options import check_integer

VOCAB = 50_000
STEPS = 400  # timed
PHRASES = 300  # that texts are made of: repetitive enough for long drafts


@dataclass(frozen=True)
class StepCost:
    """Microseconds per step of one drafter: propose and observe."""

    method: str
    context: int
    steps: int
    mean_us: float
    median_us: float
    worst_us: float
    tokens_per_step: float  # tokens that the request gained per step
    first_us: float  # of the first step, which indexes the whole prompt


@dataclass(frozen=True)
class DraftingCosts:
    """The results of both measurements."""

    steps: list[StepCost]
    responses: int
    response_tokens: int
    response_bytes: int  # memory that the process gained by storing them
    response_us: float  # per token of an added response

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def measure_drafting(
    context: int, responses: int, response_tokens: int, on_turn: OnTurn = lambda _: None
) -> DraftingCosts:
    """Costs of ngram and suffix at this context; suffix also searches all past responses."""
    for name, value in (("context", context), ("responses", responses), ("response_tokens", response_tokens)):
        check_integer(ConfigError, name, value, 16 if name == "context" else 1, None)
    texts = Texts()
    for drafter in (_ngram(), _suffix()):
        _step_cost(drafter, texts, context)  # compile
    ngram = _step_cost(_ngram(), texts, context)
    on_turn("ngram")
    drafter = _suffix(responses)
    before = resident_bytes()
    start = time.perf_counter()
    for _ in range(responses):
        _remember(drafter, texts.take(response_tokens))
    seconds = time.perf_counter() - start
    gc.collect()
    memory = resident_bytes() - before
    on_turn("past responses")
    suffix = _step_cost(drafter, texts, context)
    on_turn("suffix")
    per_token = 1e6 * seconds / (responses * response_tokens)
    return DraftingCosts([ngram, suffix], responses, response_tokens, memory, per_token)


def _ngram() -> Drafter:
    return NgramDrafter(NgramDrafter.Options())


def _suffix(responses: int = 16) -> Drafter:
    return SuffixDrafter(SuffixDrafter.Options(suffix_decoding_max_cached_requests=max(responses, 1)))


class Texts:
    """Endless token streams: repeated phrases with random tokens between them."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        lengths = self._rng.integers(4, 40, PHRASES)
        self._phrases = [self._rng.integers(0, VOCAB, length).tolist() for length in lengths]

    def take(self, count: int) -> list[int]:
        """The next `count` tokens."""
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += self._phrases[self._rng.integers(PHRASES)]
            tokens += self._rng.integers(0, VOCAB, self._rng.integers(0, 3)).tolist()
        return tokens[:count]


def _request(prompt: Sequence[int], max_tokens: int) -> Request:
    limits = Limits(VOCAB, len(prompt) + max_tokens + 1, 1, 512)
    (request,) = make_requests(
        "bench",
        0,
        prompt,
        SamplingParams(temperature=0, max_tokens=max_tokens),
        limits=limits,
        tokenizer=CountingTokenizer(),
        engine_seed=0,
        pool_tokens=limits.max_model_len,
        now=0.0,
    )
    return request


def _remember(drafter: Drafter, response: Sequence[int]) -> None:
    """Show a drafter a request from its first token to its end."""
    request = _request(response[:1], len(response))
    request.token_ids.extend(response)
    drafter.observe([request], [Verdict((), tuple(response))], None)
    drafter.forget(request)


def _step_cost(drafter: Drafter, texts: Texts, context: int) -> StepCost:
    """Propose, verify against the text, observe: as an engine does for one request."""
    plan = DraftPlan(drafter.name, METHODS[drafter.name].num_speculative_tokens)
    truth = texts.take(context + STEPS * (plan.budget + 1))
    request = _request(truth[:context], len(truth) - context)
    seconds: list[float] = []
    for _ in range(STEPS):
        start = time.perf_counter()
        trees = drafter.propose([request], [plan])
        proposed = time.perf_counter()
        verdict = _verdict(trees.tree_lists(0)[0], truth[len(request.token_ids) :])
        request.token_ids.extend(verdict.tokens)
        resumed = time.perf_counter()
        drafter.observe([request], [verdict], None)
        seconds.append(proposed - start + time.perf_counter() - resumed)
    later = seconds[1:]  # the first step indexes the prompt
    return StepCost(
        method=drafter.name,
        context=context,
        steps=len(later),
        mean_us=1e6 * statistics.fmean(later),
        median_us=1e6 * statistics.median(later),
        worst_us=1e6 * max(later),
        tokens_per_step=(len(request.token_ids) - context) / STEPS,
        first_us=1e6 * seconds[0],
    )


def _verdict(chain: Sequence[int], truth: Sequence[int]) -> Verdict:
    """The verdict on a chain if the target writes `truth`."""
    accepted = 0
    while accepted < len(chain) and chain[accepted] == truth[accepted]:
        accepted += 1
    return Verdict(tuple(range(accepted)), tuple(truth[: accepted + 1]))


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
