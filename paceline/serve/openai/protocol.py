"""Request and response fields that the endpoints share: sampling, stream options, usage, metrics.

Names are OpenAI's, and vLLM's where OpenAI has none. An unknown field is an error, and so is a known
one whose value asks for something that is not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, create_model
from pydantic_core import PydanticCustomError

from paceline.core.params import MAX_N, SamplingParams
from paceline.core.truncation import OPTIONS, Option
from paceline.engine.outputs import RequestOutput
from paceline.serve.http.errors import FieldError
from paceline.serve.openai.fields import (
    Body,
    Bool,
    Float,
    Int,
    Items,
    Name,
    NeutralFields,
    Seed,
    StructureFields,
    TokenIds,
    Unsupported,
)

MAX_STOP_STRINGS = 16  # stop strings; every new token is compared with each
MAX_STOP_LENGTH = 256  # characters of a stop string
MAX_STOP_TOKEN_IDS = 64  # entries of stop_token_ids
MAX_LOGIT_BIASES = 1024  # entries of logit_bias
MAX_ALLOWED_TOKEN_IDS = 2**16  # entries of allowed_token_ids
MAX_BAD_WORDS = 128  # entries of bad_words; each is tokenized twice
MAX_INTEGER = 2**31  # for options without an upper bound in the engine


class StreamOptions(Body):
    include_usage: Bool = False  # send a last chunk with usage and no choices
    continuous_usage_stats: Bool = False  # send the usage so far in every chunk


class Speculative(Body):
    """Speculation options of a request."""

    method: Name | None = None  # one of the server's drafters; default: the first
    num_speculative_tokens: Int | None = None  # per step; 0 is plain decoding
    branching: Int | None = None
    depth: Int | None = None
    strict: Bool | None = None  # true: a method that is not loaded is an error, not the server's default


def _checked_stop(stop: Any) -> Any:
    texts = [stop] if isinstance(stop, str) else stop
    if texts is not None and (
        not isinstance(texts, list)
        or len(texts) > MAX_STOP_STRINGS
        or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in texts)
    ):
        raise PydanticCustomError(
            "stop",
            f"must be a text of 1 to {MAX_STOP_LENGTH} characters, "
            f"or a list of at most {MAX_STOP_STRINGS} of them",
        )
    return texts


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    list[str] | None,
    PlainValidator(
        _checked_stop,
        json_schema_input_type=StopText
        | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)]
        | None,
    ),
]


def _truncation_field(option: Option) -> Any:
    """Type and default (None) of a truncation option's field."""
    high = MAX_INTEGER if option.high is None else option.high
    low: dict[str, Any] = {"gt" if option.low_open else "ge": option.low}
    return (Int if option.kind is int else Float) | None, Field(None, **low, le=high)


if TYPE_CHECKING:

    class TruncationFields(Body): ...

else:  # mypy cannot follow create_model
    TruncationFields = create_model(
        "TruncationFields",
        __base__=Body,
        **{name: _truncation_field(option) for name, option in OPTIONS.items()},
    )


class SamplingFields(StructureFields, NeutralFields, TruncationFields):
    """Sampling options. Sizes are bounded here; the engine validates the values again."""

    temperature: Float | None = Field(None, ge=0, le=1000)
    repetition_penalty: Float | None = Field(None, ge=0.01, le=100)
    presence_penalty: Float | None = Field(None, ge=-2, le=2)
    frequency_penalty: Float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Float] | None = Field(None, max_length=MAX_LOGIT_BIASES)
    allowed_token_ids: TokenIds | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)
    bad_words: Items[StopText] | None = Field(None, max_length=MAX_BAD_WORDS)
    seed: Seed | None = None
    n: Int | None = Field(None, ge=1, le=MAX_N)
    stop: Stop = None
    stop_token_ids: Items[Int] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    min_tokens: Int | None = Field(None, ge=0, le=MAX_INTEGER)
    ignore_eos: Bool | None = None
    skip_special_tokens: Bool | None = None
    include_stop_str_in_output: Bool | None = None
    speculative: Name | Speculative | None = None  # "off", "auto", a method or an object
    segment: Name | None = None  # traffic segment; also the X-Segment header
    cache_salt: Name | None = None  # requests share the prefix cache and past responses only within one salt
    return_metrics: Bool | None = None  # adds `metrics` to the response
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None  # hashed in the log
    # false: not kept by --learn. Nothing can be fetched later, so true is refused
    store: Annotated[
        Literal[False] | None, Unsupported("is not served: no answer can be fetched later. Set it to false")
    ] = None

    def sampling_params(self, **others: Any) -> SamplingParams:
        """The engine's parameters: the fields that were set, and `others`."""
        constraint = self.structure()
        if constraint is not None:
            name, structure = constraint
            if "structured_outputs" in others:
                raise FieldError(name, f"{name} cannot be beside tools or a response format. Leave one out.")
            others["structured_outputs"] = structure
        given = {name: getattr(self, name) for name in _ENGINE_FIELDS if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): value for token, value in self.logit_bias.items()}
        for name, value in given.items():
            if isinstance(value, Body):
                given[name] = value.model_dump(by_alias=True, exclude_none=True)
        return SamplingParams(**{**given, **others})

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk carries the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The usage of finished requests; a prompt with n outputs counts once."""
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        sum(output.metrics.num_cached_tokens for output in outputs),
    )


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """The usage in OpenAI's format; `cached` is only known when the request has finished."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return counts if cached is None else {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


class SpeculativeDecoding(BaseModel):
    """Speculation statistics of one request, in vLLM's format."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # length of the longest drafted path, in tokens
    unavailable_drafter: str | None = None  # asked for, but not loaded: the server's default drafted


class Routed(BaseModel):
    """How a request to a virtual model got its answer."""

    model: str  # the real model that answered
    routes: list[str]  # the virtual models that it went through
    escalations: int  # answers of smaller models that were not good enough
    fallbacks: int  # models that had no room


class Metrics(BaseModel):
    """Timings and counts of one request, returned with return_metrics. Times are in milliseconds."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None  # from the first token to the last
    queue_time_ms: float | None
    num_preemptions: int
    speculative_decoding: SpeculativeDecoding
    routed: Routed | None = None  # null: the client named a real model

    @staticmethod
    def of(output: RequestOutput, routed: Routed | None = None) -> Metrics:
        """The metrics of a finished request."""
        times = output.metrics
        return Metrics(
            time_to_first_token_ms=_milliseconds(times.arrival_time, times.first_token_time),
            generation_time_ms=_milliseconds(times.first_token_time, times.finished_time),
            queue_time_ms=_milliseconds(times.arrival_time, times.scheduled_time),
            num_preemptions=times.num_preemptions,
            speculative_decoding=SpeculativeDecoding.model_validate(times.speculative, from_attributes=True),
            routed=routed,
        )


def _milliseconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1e3


# fields of SamplingFields that go to the engine under the same name
_ENGINE_FIELDS = sorted({field.name for field in fields(SamplingParams)} & set(SamplingFields.model_fields))


def _token_id(text: str) -> int:
    """The token id in a key of logit_bias."""
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise FieldError("logit_bias", f"the keys of logit_bias must be token ids, got {text[:40]!r}.")
    return int(text)
