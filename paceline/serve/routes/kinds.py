"""The four kinds of virtual models, as a routes file declares them, and what each decides.

Nothing here runs a model: a decision is a pure function of the request, or of a finished answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.engine.outputs import CompletionOutput, RequestOutput
from paceline.errors import ConfigError
from paceline.options import check_bool, check_choice, check_integer, check_number, refuse_unknown

VERIFIERS = ("schema", "finished")
LOWEST_LOGPROB = -1000.0  # bound of min_logprob; no model gives a token less on average


@dataclass(frozen=True)
class RequestProfile:
    """What rules see of a request."""

    segment: str
    num_prompt_tokens: int = 0  # of its longest prompt
    structured: bool = False  # it has a schema, a grammar or tools
    text: str = ""  # of its user messages, or of its prompts


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class Rule:
    """One rule of a rule route: it matches if all conditions that it has hold."""

    to: str
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    segments: Sequence[str] | None = None
    structured: bool | None = None
    keywords: str | None = None  # regular expression, searched in the text

    def __post_init__(self) -> None:
        for name in ("min_prompt_tokens", "max_prompt_tokens"):
            if getattr(self, name) is not None:
                check_integer(ConfigError, name, getattr(self, name), 0, None)
        if self.segments is not None:
            _check_names("segments", self.segments)
        if self.structured is not None:
            check_bool(ConfigError, "structured", self.structured)
        if self.keywords is not None:
            _check_regex("keywords", self.keywords)
        if not self._has_condition:
            raise ConfigError(
                f"the rule to {self.to!r} has no condition: give it min_prompt_tokens, max_prompt_tokens, "
                "segments, structured or keywords, or make it the default."
            )
        low, high = self.min_prompt_tokens or 0, self.max_prompt_tokens
        if high is not None and low > high:
            raise ConfigError(
                f"the rule to {self.to!r} can never match: min_prompt_tokens is {low} and "
                f"max_prompt_tokens {high}."
            )

    @property
    def _has_condition(self) -> bool:
        return self.reads_prompt or self.segments is not None

    @property
    def reads_prompt(self) -> bool:
        """Whether the request must be tokenized before this rule can be tried."""
        conditions = (self.min_prompt_tokens, self.max_prompt_tokens, self.structured, self.keywords)
        return any(condition is not None for condition in conditions)

    def matches(self, request: RequestProfile) -> bool:
        """Whether all conditions hold."""
        return (
            (self.min_prompt_tokens is None or request.num_prompt_tokens >= self.min_prompt_tokens)
            and (self.max_prompt_tokens is None or request.num_prompt_tokens <= self.max_prompt_tokens)
            and (self.segments is None or request.segment in self.segments)
            and (self.structured is None or request.structured == self.structured)
            and (self.keywords is None or re.search(self.keywords, request.text) is not None)
        )


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class RuleRoute:
    """The first rule that matches decides; the default if none does."""

    kind: ClassVar[str] = "rule"
    default: str
    rules: Sequence[Rule]

    def __post_init__(self) -> None:
        if not self.rules:
            raise ConfigError("a rule route needs rules: add a [[routes.NAME.rules]] table for each.")

    @property
    def targets(self) -> tuple[str, ...]:
        """The names that it may lead to, the default first."""
        return (self.default, *(rule.to for rule in self.rules))

    @property
    def reads_prompt(self) -> bool:
        """Whether any rule needs the tokenized request."""
        return any(rule.reads_prompt for rule in self.rules)

    def choose(self, request: RequestProfile) -> str:
        """The name that a request goes to."""
        return next((rule.to for rule in self.rules if rule.matches(request)), self.default)


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class WeightRoute:
    """Splits users among models, always the same way."""

    kind: ClassVar[str] = "weight"
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping) or not self.weights:
            raise ConfigError("a weight route needs weights, such as weights = { small = 90, large = 10 }.")
        for name, weight in self.weights.items():
            check_number(
                ConfigError, f"the weight of {name!r}", weight, 0, 1e9, low_open=True, remedy="Use 1 or more."
            )

    @property
    def targets(self) -> tuple[str, ...]:
        """The names that it may lead to."""
        return tuple(self.weights)

    def choose(self, route: str, key: str) -> str:
        """The name for everything with this key. Other routes split the same keys in another way."""
        digest = hashlib.sha256(f"{route}\0{key}".encode()).digest()
        point = int.from_bytes(digest[:8], "big") / 2**64 * sum(self.weights.values())
        for name, weight in self.weights.items():
            point -= weight
            if point < 0:
                return name
        return name  # rounding


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class CascadeRoute:
    """Models from small to large: each answer but the last one's is sent only if it is good enough."""

    kind: ClassVar[str] = "cascade"
    models: Sequence[str]
    min_logprob: float | None = None  # mean log-probability per token
    verify: Sequence[str] = ()  # of VERIFIERS
    must_match: str | None = None  # regular expressions, searched in the answer
    must_not_match: str | None = None

    def __post_init__(self) -> None:
        _check_names("models", self.models, least=2)
        if self.min_logprob is not None:
            check_number(ConfigError, "min_logprob", self.min_logprob, LOWEST_LOGPROB, 0)
        if not isinstance(self.verify, list | tuple):
            raise ConfigError(f"verify must be a list of {', '.join(VERIFIERS)}, got {self.verify!r}.")
        for verifier in self.verify:
            check_choice(ConfigError, "verify", verifier, VERIFIERS)
        for name in ("must_match", "must_not_match"):
            if getattr(self, name) is not None:
                _check_regex(name, getattr(self, name))
        if not (self.reads_logprobs or self.verify or self.must_match or self.must_not_match):
            raise ConfigError(
                f"a cascade without a criterion never asks {self.models[-1]!r}: set min_logprob, verify, "
                "must_match or must_not_match."
            )

    @property
    def targets(self) -> tuple[str, ...]:
        """Its models, the smallest first."""
        return tuple(self.models)

    @property
    def reads_logprobs(self) -> bool:
        """Whether answers are judged by their log-probabilities."""
        return self.min_logprob is not None

    def accepts(self, outputs: Sequence[RequestOutput], structure: StructuredOutputsParams | None) -> bool:
        """Whether every output of a finished answer is good enough."""
        completions = [completion for output in outputs for completion in output.outputs]
        return all(self._accepts(completion, structure) for completion in completions)

    def _accepts(self, completion: CompletionOutput, structure: StructuredOutputsParams | None) -> bool:
        if completion.error is not None:
            return False
        if self.min_logprob is not None and mean_logprob(completion) < self.min_logprob:
            return False
        if "finished" in self.verify and completion.finish_reason != "stop":
            return False
        if "schema" in self.verify and structure is not None and not _is_whole(completion, structure):
            return False
        if self.must_match is not None and not re.search(self.must_match, completion.text):
            return False
        return self.must_not_match is None or not re.search(self.must_not_match, completion.text)


def mean_logprob(completion: CompletionOutput) -> float:
    """The mean log-probability of an output's tokens; 0 if it has none."""
    assert completion.cumulative_logprob is not None, "it was generated with logprobs"
    return completion.cumulative_logprob / max(1, len(completion.token_ids))


def _is_whole(completion: CompletionOutput, structure: StructuredOutputsParams) -> bool:
    """Whether a structured answer fits its schema or grammar.

    Every token was allowed by it, so only an answer that was cut off does not: by max_tokens, or, inside
    JSON, by a stop string.
    """
    if completion.finish_reason != "stop":
        return False
    if not structure.kind.startswith("json"):
        return True
    try:
        json.loads(completion.text)
    except ValueError:
        return False
    return True


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class FallbackRoute:
    """The first model that has room answers."""

    kind: ClassVar[str] = "fallback"
    models: Sequence[str]

    def __post_init__(self) -> None:
        _check_names("models", self.models, least=2)

    @property
    def targets(self) -> tuple[str, ...]:
        """Its models, the preferred one first."""
        return tuple(self.models)


Route = RuleRoute | WeightRoute | CascadeRoute | FallbackRoute
KINDS: dict[str, type[Route]] = {
    kind.kind: kind for kind in (RuleRoute, WeightRoute, CascadeRoute, FallbackRoute)
}


def _check_names(option: str, names: object, least: int = 1) -> None:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{option} must be a list of names, got {names!r:.80}.")
    if len(names) < least:
        raise ConfigError(f"{option} must have at least {least} names, got {list(names)!r:.80}.")
    if len(set(names)) < len(names):
        raise ConfigError(f"{option} has a name twice: {list(names)!r:.80}.")


def _check_regex(option: str, pattern: object) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"{option} must be a regular expression, got {pattern!r}.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{option} is not a regular expression of Python ({error}): {pattern!r:.120}. Write it between "
            "single quotes in TOML, so that backslashes stay."
        ) from None
