"""What endpoints have in common on the wire: sampling fields, stream options, usage, metrics.

The names are OpenAI's; those that OpenAI does not have are vLLM's. A field that does not exist is
an error, and so is a known one whose value asks for what we do not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, create_model
from pydantic_core import PydanticCustomError

from paceline.constrain.limits import GrammarLimits
from paceline.core.params import MAX_N, SamplingParams
from paceline.core.truncation import OPTIONS, Option
from paceline.engine.outputs import RequestOutput, SpeculativeMetrics
from paceline.serve.errors import FieldError
from paceline.serve.fields import Body, Bool, Float, Int, Items, Name, Unsupported

MOST_STOPS = 16  # every token is compared with each
MOST_STOP_TEXT = 256  # characters of a stop string
MOST_STOP_IDS = 64
MOST_BIASES = 1024
MOST_INTEGER = 2**31  # where the engine has no upper end


class StreamOptions(Body):
    include_usage: Bool = False  # a last chunk with the usage and no choices
    continuous_usage_stats: Bool = False  # the usage so far in every chunk


class Speculative(Body):
    """What is drafted for a request."""

    method: Name | None = None  # one of the server's drafters; left out: its first
    num_speculative_tokens: Int | None = None  # in a step; 0 is plain decoding
    branching: Int | None = None
    depth: Int | None = None


GrammarText = Annotated[str, Field(max_length=GrammarLimits.source_bytes)]  # no more is compiled


class StructuredOutputs(Body):
    """The form of an output: exactly one of the first five."""

    json_: dict[str, Any] | GrammarText | None = Field(None, alias="json")  # a JSON schema
    json_object: Bool | None = None
    regex: GrammarText | None = None
    choice: Items[GrammarText] | None = None
    grammar: GrammarText | None = None  # Lark or GBNF
    whitespace_pattern: GrammarText | None = None


def _checked_stop(stop: Any) -> Any:
    texts = [stop] if isinstance(stop, str) else stop
    if texts is not None and (
        not isinstance(texts, list)
        or len(texts) > MOST_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= MOST_STOP_TEXT for text in texts)
    ):
        raise PydanticCustomError(
            "stop",
            f"must be a text of 1 to {MOST_STOP_TEXT} characters, or a list of at most {MOST_STOPS} of them",
        )
    return texts


StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP_TEXT)]
Stop = Annotated[
    list[str] | None,
    PlainValidator(
        _checked_stop,
        json_schema_input_type=StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None,
    ),
]
_USE_STRUCTURED = Unsupported('is not a field here: use structured_outputs, such as {"regex": "[0-9]+"}')


def _truncation_field(option: Option) -> Any:
    """The field of a truncation option: its type and its default, None."""
    high = MOST_INTEGER if option.high is None else option.high
    low: dict[str, Any] = {"gt" if option.low_open else "ge": option.low}
    return (Int if option.kind is int else Float) | None, Field(None, **low, le=high)


if TYPE_CHECKING:

    class TruncationFields(Body): ...

else:  # what mypy cannot follow
    TruncationFields = create_model(
        "TruncationFields",
        __base__=Body,
        **{name: _truncation_field(option) for name, option in OPTIONS.items()},
    )


class SamplingFields(TruncationFields):
    """How tokens are chosen. The engine checks the values again; here sizes are bounded."""

    temperature: Float | None = Field(None, ge=0, le=1000)
    repetition_penalty: Float | None = Field(None, ge=0.01, le=100)
    presence_penalty: Float | None = Field(None, ge=-2, le=2)
    frequency_penalty: Float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Float] | None = Field(None, max_length=MOST_BIASES)
    seed: Int | None = Field(None, ge=-(2**63), lt=2**64)
    n: Int | None = Field(None, ge=1, le=MAX_N)
    stop: Stop = None
    stop_token_ids: Items[Int] | None = Field(None, max_length=MOST_STOP_IDS)
    min_tokens: Int | None = Field(None, ge=0, le=MOST_INTEGER)
    ignore_eos: Bool | None = None
    skip_special_tokens: Bool | None = None
    include_stop_str_in_output: Bool | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative: Name | Speculative | None = None  # "off", "auto", a method or an object
    segment: Name | None = None  # the kind of traffic; the header X-Segment says the same
    cache_salt: Name | None = None  # only requests of the same salt share the prefix cache and past responses
    return_metrics: Bool | None = None  # the response then has `metrics`
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None  # for the log
    guided_json: Annotated[None, _USE_STRUCTURED] = None
    guided_regex: Annotated[None, _USE_STRUCTURED] = None
    guided_choice: Annotated[None, _USE_STRUCTURED] = None
    guided_grammar: Annotated[None, _USE_STRUCTURED] = None

    def sampling_params(self, **others: Any) -> SamplingParams:
        """The engine's parameters: the fields that were given, and `others`."""
        if self.structured_outputs is not None and "structured_outputs" in others:
            raise FieldError(
                "structured_outputs", "structured_outputs cannot be beside tools or a response format."
            )
        given = {name: getattr(self, name) for name in _ENGINE_FIELDS if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): value for token, value in self.logit_bias.items()}
        for name, value in given.items():
            if isinstance(value, Body):
                given[name] = value.model_dump(by_alias=True, exclude_none=True)
        return SamplingParams(**{**given, **others})

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The usage of finished prompts; a prompt of n outputs counts once."""
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(one.token_ids) for output in outputs for one in output.outputs),
        sum(output.metrics.num_cached_tokens for output in outputs),
    )


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """The usage in OpenAI's shape; `cached` is known only at the end."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return counts if cached is None else {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


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
