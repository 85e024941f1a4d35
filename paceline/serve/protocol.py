"""What endpoints have in common on the wire: sampling fields, stream options, usage, metrics.

The names are OpenAI's; those that OpenAI does not have are vLLM's. A field that does not exist is
an error, and so is a known one whose value asks for what we do not do.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.engine.outputs import RequestOutput, SpeculativeMetrics
from paceline.serve.errors import FieldError
from paceline.verify.params import MOST_CHILDREN, SamplingParams

MOST_STOPS = 64
MOST_BIASES = 1024
MOST_TEXT = 256  # characters of a name: a segment, a salt, a user


class Body(BaseModel):
    """A request body, or an object in it: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False  # a last chunk with the usage and no choices
    continuous_usage_stats: bool = False  # the usage so far in every chunk


Name = Annotated[str, Field(max_length=MOST_TEXT)]


class SamplingFields(Body):
    """How tokens are chosen. The engine checks the values; here only sizes are bounded."""

    temperature: float | None = Field(None, ge=0, le=1000, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[str, float] | None = Field(None, max_length=MOST_BIASES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int | None = Field(None, ge=1, le=MOST_CHILDREN)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MOST_STOPS)
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = (
        None  # {"regex" | "choice" | "grammar" | "json" | "json_object"}
    )
    speculative: str | dict[str, Any] | None = None  # "off", "auto", a method or an object
    segment: Name | None = None  # the kind of traffic; the header X-Segment says the same
    cache_salt: Name | None = None  # only requests of the same salt share the prefix cache
    return_metrics: bool | None = None  # the response then has `metrics`
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None  # for the log

    def sampling_params(self, **others: Any) -> SamplingParams:
        """The engine's parameters: the fields that were given, and `others`."""
        given = {name: getattr(self, name) for name in _ENGINE_FIELDS if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): value for token, value in self.logit_bias.items()}
        return SamplingParams(**{**given, **others})


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


def usage_of(output: RequestOutput) -> Usage:
    """The usage of a finished request; a prompt of n outputs counts once."""
    prompt = len(output.prompt_token_ids)
    completion = sum(len(one.token_ids) for one in output.outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=output.metrics.num_cached_tokens),
    )


class SpeculativeDecoding(BaseModel):
    """What drafting did for one request, in vLLM's shape."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # most tokens of one draft's path

    @staticmethod
    def of(metrics: SpeculativeMetrics) -> SpeculativeDecoding:
        """The figures of a request."""
        return SpeculativeDecoding(
            mean_acceptance_length=metrics.mean_acceptance_length,
            draft_acceptance_rate=metrics.draft_acceptance_rate,
            acceptance_histogram=metrics.acceptance_histogram,
            num_spec_steps=metrics.num_spec_steps,
            num_accepted_draft_tokens=metrics.num_accepted_draft_tokens,
            num_draft_tokens=metrics.num_draft_tokens,
            num_spec_tokens=len(metrics.drafts_per_position),
        )


class Metrics(BaseModel):
    """The figures of one request, given when it asks with return_metrics. Times are milliseconds."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None  # from the first token to the last
    queue_time_ms: float | None
    num_preemptions: int
    speculative_decoding: SpeculativeDecoding

    @staticmethod
    def of(output: RequestOutput) -> Metrics:
        """The figures of a finished request."""
        times = output.metrics
        return Metrics(
            time_to_first_token_ms=_milliseconds(times.arrival_time, times.first_token_time),
            generation_time_ms=_milliseconds(times.first_token_time, times.finished_time),
            queue_time_ms=_milliseconds(times.arrival_time, times.scheduled_time),
            num_preemptions=times.num_preemptions,
            speculative_decoding=SpeculativeDecoding.of(times.speculative),
        )


def _milliseconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1e3


# fields of SamplingFields that go to the engine under the same name
_ENGINE_FIELDS = sorted({field.name for field in fields(SamplingParams)} & set(SamplingFields.model_fields))


def _token_id(text: str) -> int:
    """The token id that a key of logit_bias spells."""
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise FieldError("logit_bias", f"the keys of logit_bias must be token ids, got {text[:40]!r}.")
    return int(text)


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
