"""RequestOutput and its parts: what a user gets back. The names are vLLM's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from paceline.core.detokenizer import TextTokenizer
from paceline.core.request import Request
from paceline.core.verdict import Logprob

TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class SpeculativeMetrics:
    """The drafting statistics of a request. All zero, and the mean length 1, when nothing was drafted."""

    num_spec_steps: int = 0  # steps with at least one drafted token
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # [i] steps that accepted i tokens
    drafts_per_position: list[int] = field(default_factory=list)  # [d] drafts that reached depth d + 1
    accepted_per_position: list[int] = field(default_factory=list)  # [d] of these, accepted there
    draft_time: float = 0.0  # seconds; a step's time is split evenly among its requests
    verify_time: float = 0.0  # seconds
    failed_drafters: list[str] = field(default_factory=list)  # they raised, and were not asked again
    unavailable_drafter: str | None = None  # asked for, but not loaded: the engine's default drafted
    drafters: dict[str, int] = field(default_factory=dict)  # drafts by drafter

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per drafted step, the bonus token included."""
        return 1.0 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """The accepted fraction of drafted tokens."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    @property
    def num_spec_tokens(self) -> int:
        """Length of the longest drafted path, in tokens."""
        return len(self.drafts_per_position)

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """[d] the fraction of drafts accepted at depth d + 1, of those that reached it."""
        pairs = zip(self.accepted_per_position, self.drafts_per_position, strict=True)
        return [accepted / drafts for accepted, drafts in pairs]


@dataclass(frozen=True)
class RequestMetrics:
    """The times of a request, in seconds of one monotonic clock, and its counts."""

    arrival_time: float
    scheduled_time: float | None  # when it first took part in a pass
    first_token_time: float | None
    finished_time: float | None
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    num_preemptions: int
    speculative: SpeculativeMetrics


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n outputs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # stop | length | abort | error
    stop_reason: int | str | None  # the stop id or stop string that ended it
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float | None
    error: Exception | None = None  # why, when finish_reason is error


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


def request_output(
    prompt: str | None, children: Sequence[Request], tokenizer: TextTokenizer
) -> RequestOutput:
    """The current output of a request, from its n children."""
    first = children[0]
    prompt_logprobs = None
    if first.params.prompt_logprobs is not None:
        prompt_logprobs = [entry and with_texts(entry, tokenizer) for entry in first.prompt_logprobs]
        prompt_logprobs = prompt_logprobs or [None]  # a prompt of one token has no log-probabilities
    return RequestOutput(
        request_id=first.request_id,
        prompt=prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=[_completion(request, tokenizer) for request in children],
        finished=all(request.finished for request in children),
        metrics=_metrics(children),
    )


def _completion(request: Request, tokenizer: TextTokenizer) -> CompletionOutput:
    tokens = request.output_token_ids
    with_logprobs = request.params.logprobs is not None
    # the tokens that were sampled here: a resumed output starts with tokens of another engine
    sampled = tokens[len(tokens) - len(request.logprobs) :]
    chosen = [entry[token].logprob for entry, token in zip(request.logprobs, sampled, strict=True)]
    return CompletionOutput(
        index=request.child,
        text=request.detokenizer.text,
        token_ids=tokens,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=[with_texts(entry, tokenizer) for entry in request.logprobs] if with_logprobs else None,
        cumulative_logprob=sum(chosen) if with_logprobs else None,
        error=request.error,
    )


def _metrics(children: Sequence[Request]) -> RequestMetrics:
    starts = [request.first_token_time for request in children if request.first_token_time is not None]
    ends = [request.finished_time for request in children if request.finished_time is not None]
    return RequestMetrics(
        arrival_time=children[0].arrival_time,
        scheduled_time=children[0].scheduled_time,
        first_token_time=min(starts, default=None),
        finished_time=max(ends) if len(ends) == len(children) else None,
        num_cached_tokens=children[0].num_cached_tokens,
        num_preemptions=sum(request.num_preemptions for request in children),
        speculative=_speculative_metrics(children),
    )


def _speculative_metrics(children: Sequence[Request]) -> SpeculativeMetrics:
    counts = [request.speculative for request in children]
    return SpeculativeMetrics(
        num_spec_steps=sum(count.num_spec_steps for count in counts),
        num_draft_tokens=sum(count.num_draft_tokens for count in counts),
        num_accepted_draft_tokens=sum(count.num_accepted_draft_tokens for count in counts),
        acceptance_histogram=_summed([count.acceptance_histogram for count in counts]),
        drafts_per_position=_summed([count.drafts_per_position for count in counts]),
        accepted_per_position=_summed([count.accepted_per_position for count in counts]),
        draft_time=sum(count.draft_time for count in counts),
        verify_time=sum(count.verify_time for count in counts),
        failed_drafters=sorted({name for request in children for name in request.failed_drafters}),
        unavailable_drafter=children[0].unavailable_drafter,
        drafters=dict(sum([Counter(count.drafters) for count in counts], Counter())),
    )


def _summed(lists: Sequence[list[int]]) -> list[int]:
    """The element-wise sums; shorter lists are padded with 0."""
    return [sum(values) for values in zip_longest(*lists, fillvalue=0)]


def with_texts(entry: TokenLogprobs, tokenizer: TextTokenizer) -> TokenLogprobs:
    """The entry with the text of each token."""
    return {
        token: Logprob(
            logprob.logprob, logprob.rank, tokenizer.token_bytes(token).decode("utf-8", errors="replace")
        )
        for token, logprob in entry.items()
    }
