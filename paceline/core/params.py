"""SamplingParams: the sampling options of a request. The names are vLLM's."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.structured_outputs import StructuredOutputsParams, as_structured_outputs
from paceline.core.truncation import KEEPS_ALL, Truncation, check_truncation
from paceline.errors import RequestError
from paceline.options import check_bool, check_integer, check_number, refuse_unknown

GREEDY_BELOW = 1e-5  # lower temperatures are greedy, as in vLLM
MAX_LOGPROBS = 20  # per token
MAX_N = 128  # outputs of a request
_truncation_fields = operator.attrgetter(*Truncation._fields)


@refuse_unknown(RequestError)
@dataclass(frozen=True)
class SamplingParams:
    """The options of one request. Out-of-range values and unknown names raise RequestError.

    Every option is exact under speculation, and none changes the output of another request in the batch.
    """

    n: int = 1  # number of outputs; they share the prompt's KV pages
    temperature: float = 1.0  # 0 is greedy: the largest logit, ties to the lowest id
    top_k: int = KEEPS_ALL.top_k  # keep the k likeliest; 0 or -1 keeps all
    top_p: float = KEEPS_ALL.top_p  # keep the fewest likeliest whose probabilities reach this sum
    min_p: float = KEEPS_ALL.min_p  # keep ids with at least this fraction of the likeliest one's probability
    # divides positive and multiplies negative logits of prompt and output ids
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the logits of output ids
    frequency_penalty: float = 0.0  # subtracted once for each occurrence of the id in the output
    logit_bias: Mapping[int, float] | None = None  # added to the logits of the given ids, -100 to 100
    allowed_token_ids: Sequence[int] | None = None  # only these ids are sampled; None: all
    bad_words: str | Sequence[str] | None = None  # words that do not occur, with or without a space before
    seed: int | None = None  # None: derived from the engine's seed and the request's order of arrival
    stop: str | Sequence[str] | None = None  # strings that end the output
    stop_token_ids: Sequence[int] | None = None  # token ids that end the output, besides end-of-sequence
    min_tokens: int = 0  # suppress end-of-sequence and stop ids before this many tokens
    max_tokens: int | None = 16  # None: until the context is full
    ignore_eos: bool = False  # end-of-sequence is a token like any other
    logprobs: int | None = None  # log-probabilities of the chosen token and of this many likeliest
    prompt_logprobs: int | None = None  # the same for every prompt token
    skip_special_tokens: bool = True  # leave special tokens out of the text
    include_stop_str_in_output: bool = False  # keep the stop string that ended the output in the text
    # drafting: None or "auto" (the engine decides), "off" (plain decoding), a method's name, or
    # {"method": ..., "num_speculative_tokens": ..., "branching": ..., "depth": ...}, each optional. A method
    # that is not loaded is replaced by the engine's default, with a warning; "strict": True makes it an error
    speculative: str | Mapping[str, Any] | None = None
    # constrained decoding: a JSON schema, a regular expression, choices or a grammar
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check every field and normalize it to tuples, ints and floats."""
        error = RequestError
        checked: dict[str, Any] = {
            "n": check_integer(error, "n", self.n, 1, MAX_N),
            "temperature": check_number(
                error, "temperature", self.temperature, 0, 1000, remedy="Use 0 for greedy decoding."
            ),
            **{name: check_truncation(name, getattr(self, name)) for name in Truncation._fields},
            # further from 1 the quotient would overflow float32
            "repetition_penalty": check_number(
                error, "repetition_penalty", self.repetition_penalty, 0.01, 100, remedy="1 is none."
            ),
            "presence_penalty": check_number(error, "presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": check_number(error, "frequency_penalty", self.frequency_penalty, -2, 2),
            "logit_bias": _checked_bias(self.logit_bias),
            "allowed_token_ids": _checked_allowed(self.allowed_token_ids),
            "bad_words": _checked_texts("bad_words", self.bad_words),
            "stop": _checked_texts("stop", self.stop),
            "stop_token_ids": _checked_ids("stop_token_ids", self.stop_token_ids),
            "min_tokens": check_integer(error, "min_tokens", self.min_tokens, 0, None),
            "ignore_eos": check_bool(error, "ignore_eos", self.ignore_eos),
            "skip_special_tokens": check_bool(error, "skip_special_tokens", self.skip_special_tokens),
            "include_stop_str_in_output": check_bool(
                error, "include_stop_str_in_output", self.include_stop_str_in_output
            ),
            "structured_outputs": as_structured_outputs(self.structured_outputs),
        }
        if not isinstance(self.speculative, str | Mapping | None):
            raise RequestError(
                "speculative must be 'off', 'auto', a method's name or an object such as "
                f"{{'method': 'ngram', 'num_speculative_tokens': 4}}, got {self.speculative!r}."
            )
        if self.seed is not None:
            seed = check_integer(error, "seed", self.seed, -(2**63), 2**64 - 1)
            checked["seed"] = seed % 2**64
        if self.max_tokens is not None:
            checked["max_tokens"] = check_integer(
                error, "max_tokens", self.max_tokens, 1, None, "To fill the context, give a large number."
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                checked[name] = check_integer(error, name, count, 0, MAX_LOGPROBS, "Use None for none.")
        if checked["temperature"] < GREEDY_BELOW:
            checked["temperature"] = 0.0
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}. "
                "Lower min_tokens or raise max_tokens."
            )

    @property
    def greedy(self) -> bool:
        """Whether the token is the largest logit, without noise."""
        return self.temperature == 0.0

    @property
    def truncation(self) -> Truncation:
        """top_k, top_p and min_p as one record."""
        return Truncation._make(_truncation_fields(self))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # __post_init__ made it a tuple

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.stop_token_ids  # type: ignore[return-value]  # __post_init__ made it a tuple

    @property
    def bad_texts(self) -> tuple[str, ...]:
        return self.bad_words  # type: ignore[return-value]  # __post_init__ made it a tuple

    @property
    def structure(self) -> StructuredOutputsParams | None:
        return self.structured_outputs  # type: ignore[return-value]  # __post_init__ made it one


def _checked_bias(bias: object) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {bias!r} ({type(bias).__name__}).")
    return {
        check_integer(RequestError, "a token id of logit_bias", token, 0, None): check_number(
            RequestError, f"logit_bias[{token!r}]", value, -100, 100
        )
        for token, value in bias.items()
    }


def _checked_texts(name: str, given: object) -> tuple[str, ...]:
    texts = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} must be a non-empty string or a list of them, got {given!r:.80}.")
    return tuple(dict.fromkeys(texts))


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise RequestError(f"{name} must be a list of token ids, got {ids!r:.80} ({type(ids).__name__}).")
    return tuple(check_integer(RequestError, f"an id of {name}", token, 0, None) for token in ids)


def _checked_allowed(ids: object) -> tuple[int, ...] | None:
    if ids is None:
        return None
    checked = tuple(dict.fromkeys(_checked_ids("allowed_token_ids", ids)))
    if not checked:
        raise RequestError(
            "allowed_token_ids is empty, so no token could be sampled: name at least one id, or leave it out."
        )
    return checked
