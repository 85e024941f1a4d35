"""The messages between an ingress and its replicas: requests one way, tokens the other way.

They are JSON frames on one TCP connection per replica and ingress (see channel.py), so nothing that is read
can run code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from paceline import errors
from paceline.core.params import SamplingParams
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.core.trees import DraftPlan
from paceline.core.verdict import Logprob
from paceline.engine.admission import Limits
from paceline.engine.frontend.stream import Update
from paceline.engine.outputs import RequestMetrics, RequestOutput, SpeculativeMetrics, TokenLogprobs
from paceline.errors import BackendError, PacelineError


class Address(NamedTuple):
    """Where an ingress listens for tokens. A replica needs the secret to connect."""

    host: str
    port: int
    secret: str


@dataclass(frozen=True)
class Description:
    """What an ingress must know about a replica to check requests as the replica would."""

    weights_id: str  # only replicas with the same one give the same bytes
    limits: Limits
    plans: Mapping[str, DraftPlan]  # of each loaded drafter, the default first
    pool_tokens: int  # that the KV cache holds
    page_size: int  # tokens
    facts: Mapping[str, str]  # for the log and the metrics


@dataclass(frozen=True)
class RemoteRequest:
    """One attempt at a request, as a replica gets it. Its params always have a seed."""

    key: str  # of this attempt
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    structure: StructuredOutputsParams | None  # what was compiled at the ingress; the replica compiles it too
    lenient: bool
    segment: str
    cache_salt: str
    adapter: str  # "": none
    resume: Mapping[int, Sequence[int]] | None  # tokens that unfinished outputs already have


# --- JSON ---


def encode_request(request: RemoteRequest) -> list[Any]:
    """A request as JSON."""
    resume = None if request.resume is None else list(request.resume.items())
    return ["request", {**asdict(request), "resume": resume}]


def decode_request(encoded: Mapping[str, Any]) -> RemoteRequest:
    """The request of `encode_request`'s JSON, whose keys are texts: numbers are converted back."""
    params, structure, resume = encoded["params"], encoded["structure"], encoded["resume"]
    bias = {int(token): value for token, value in params["logit_bias"].items()}
    values = {
        **encoded,
        "params": SamplingParams(**{**params, "logit_bias": bias}),
        "structure": None if structure is None else StructuredOutputsParams(**structure),
        "resume": None if resume is None else dict(resume),
    }
    return RemoteRequest(**values)


def encode_update(key: str, start: int, update: Update) -> list[Any]:
    """An update as JSON; `start` is the number of tokens that its output had before."""
    logprobs = None if update.logprobs is None else [encode_logprobs(entry) for entry in update.logprobs]
    error = None if update.error is None else encode_error(update.error)
    reason, stop = update.finish_reason, update.stop_reason
    return ["tokens", key, update.index, start, update.token_ids, logprobs, reason, stop, error]


class TokenUpdate(NamedTuple):
    """The new tokens of one output, as the ingress gets them."""

    key: str
    child: int  # which of the n outputs
    start: int  # tokens that it had before
    token_ids: list[int]
    logprobs: list[Any] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: list[str] | None


def encode_logprobs(entry: TokenLogprobs | None) -> list[Any] | None:
    if entry is None:
        return None
    return [[token, float(logprob.logprob), logprob.rank] for token, logprob in entry.items()]


def decode_logprobs(entry: list[Any] | None) -> TokenLogprobs | None:
    if entry is None:
        return None
    return {token: Logprob(logprob, rank) for token, logprob, rank in entry}


def encode_error(error: Exception) -> list[str]:
    return [type(error).__name__, str(error)]


def decode_error(encoded: Sequence[str]) -> PacelineError:
    """The replica's error; one of another kind becomes a BackendError."""
    name, message = encoded
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, PacelineError):
        return kind(message)
    return BackendError(f"a replica failed: {name}: {message}")


def encode_output(output: RequestOutput) -> dict[str, Any]:
    """The parts of an output that the ingress cannot compute: metrics and prompt log-probabilities."""
    prompt = output.prompt_logprobs
    return {
        "metrics": asdict(output.metrics),
        "prompt_logprobs": None if prompt is None else [encode_logprobs(entry) for entry in prompt],
    }


def decode_metrics(encoded: dict[str, Any]) -> RequestMetrics:
    speculative = SpeculativeMetrics(**encoded["speculative"])
    return RequestMetrics(**{**encoded, "speculative": speculative})
