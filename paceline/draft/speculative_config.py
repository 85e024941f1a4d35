"""Parsing speculative_config: which drafters are loaded, their plans, and the verification rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DraftSampling
from paceline.draft.methods import (
    AUTO,
    METHODS,
    OFF,
    SHORT_NAMES,
    DrafterConfig,
    find_method,
    method_names,
    options_of,
)
from paceline.errors import ConfigError, PacelineError
from paceline.models.heads.shipped import DEFAULT_METHOD, SHIPPED_HEAD
from paceline.options import check_integer, nearest, unknown_option
from paceline.verify.rules import RULES

MAX_NODES = 1024  # nodes of a draft, and the limit of branching and depth
SHIPPED = {"method": DEFAULT_METHOD, "model": SHIPPED_HEAD}  # what "shipped" is short for
PLAN_KEYS = ("method", "num_speculative_tokens", "branching", "depth")  # requests may set these too
SHARED_KEYS = ("verification", "rejection_sample_method", "draft_sample_method")  # the same for all drafters
SAMPLE_METHODS = ("probabilistic", "greedy")  # values of draft_sample_method
RULE_NAMES = {"standard": "rejection", "block": "block"}  # vLLM's rejection_sample_method


@dataclass(frozen=True)
class Speculation:
    """A parsed speculative_config. Without drafters: plain decoding."""

    drafters: Mapping[str, DrafterConfig]  # by method; the first is the default
    rule: str = "pathwise"  # a key of RULES
    sampling: DraftSampling = DraftSampling.COUPLED
    forced: bool = True  # draft the tokens that a constraint forces, with any drafter
    auto: bool = False  # the controller chooses drafter and length in each step; no drafters: all available

    @property
    def default_plan(self) -> DraftPlan:
        return next((config.plan for config in self.drafters.values()), PLAIN)


def parse_speculative_config(given: Any) -> Speculation:
    """The speculation that a speculative_config asks for. ConfigError if it is not valid.

    Accepted forms: None; "off", which does not even draft forced tokens; an object as vLLM takes it; a short
    form such as "ngram" or "model:PATH"; or several of these, as a list or separated by commas. Each request
    chooses one of several drafters, by default the first. With "auto" among them the controller decides
    which of the others drafts in each step, and how much.
    """
    entries = _entries(given)
    if not entries:
        return Speculation({}, forced=given is None)
    shared = _shared(entries)
    named = [entry for entry in entries if not _is_auto(entry)]
    drafters: dict[str, DrafterConfig] = {}
    for entry in named:
        name, config = _drafter(entry, RULES[shared.rule].trees, shared.rule)
        if name in drafters:
            raise ConfigError(f"speculative_config names the method {name!r} twice: name each once.")
        drafters[name] = config
    return replace(shared, drafters=drafters, auto=len(named) < len(entries))


def parse_plan(
    error: type[PacelineError], given: Mapping[str, Any], default: DraftPlan | None, name: str, trees: bool
) -> DraftPlan:
    """The plan of num_speculative_tokens, branching and depth; `trees`: whether the drafter may branch."""
    method = find_method(name)
    default_plan = default or DraftPlan(name, method.num_speculative_tokens if method else 1)
    tokens = check_integer(
        error,
        "num_speculative_tokens",
        given.get("num_speculative_tokens", default_plan.budget),
        0,
        MAX_NODES,
        "0 is plain decoding.",
    )
    branching = check_integer(
        error, "branching", given.get("branching", default_plan.branching), 1, MAX_NODES
    )
    depth = given.get("depth", default_plan.depth)
    if depth is not None:
        depth = check_integer(error, "depth", depth, 1, MAX_NODES)
    if branching > 1 and not trees:
        raise error(f"branching is {branching}, but {name} drafts chains here. Leave branching out.")
    return DraftPlan(name, tokens, branching, depth) if tokens else PLAIN


def _entries(given: Any) -> list[Mapping[str, Any]]:
    """The drafters of a speculative_config, each as an object."""
    if given is None or given == OFF:
        return []
    if isinstance(given, str):
        if given.lstrip().startswith(("{", "[")):
            return _entries(_from_json(given))
        return [_from_short_form(part.strip()) for part in given.split(",")]
    if isinstance(given, Mapping):
        return [given]
    if isinstance(given, Sequence) and given:
        return [entry for part in given for entry in _entries(part)]
    raise ConfigError(
        f"speculative_config must be an object such as {{'method': 'suffix'}}, a list of those, a short form "
        f"such as 'suffix', or 'off'; got {given!r}."
    )


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"speculative_config is not JSON ({error}): {text[:80]!r}. "
            'Write it like \'{"method": "suffix", "num_speculative_tokens": 8}\'.'
        ) from None


def _from_short_form(text: str) -> Mapping[str, Any]:
    name, colon, rest = text.partition(":")
    name = SHORT_NAMES.get(name, name)
    if text == SHIPPED_HEAD:
        return SHIPPED
    method = find_method(name)
    if (method is not None or name == AUTO) and not colon:
        return {"method": name}
    argument = method.argument if method is not None else None
    if argument is not None and rest:
        with suppress(ValueError):
            return {"method": name, argument.option: argument.read(rest)}
    if method is not None and rest.isdecimal():
        config = json.dumps({"method": name, "num_speculative_tokens": int(rest)})
        after = "nothing" if argument is None else argument.shown
        raise ConfigError(
            f"{text!r}: {name} takes {after} after the colon. If {rest} is a length, write it as "
            f"num_speculative_tokens: --draft '{config}'."
        )
    long_names = SHORT_NAMES.values()
    short_forms = [
        f"{name}:{row.argument.shown}" if (row := METHODS.get(name)) and row.argument else name
        for name in method_names()
        if name not in long_names
    ]
    if text == OFF:
        raise ConfigError(
            f"{OFF!r} stands alone: name it without other methods. Each request can say it too."
        )
    near = nearest(name, [*method_names(), *SHORT_NAMES, AUTO, OFF, SHIPPED_HEAD]) if method is None else ""
    raise ConfigError(
        f"{text!r} names no drafting method{near or '.'} Use off, auto, model:PATH, {SHIPPED_HEAD}, or one "
        f"of {', '.join(short_forms)}."
    )


def _is_auto(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is "auto". ConfigError if it has keys that auto does not take."""
    if entry.get("method") != AUTO:
        return False
    for key in entry:
        if key not in ("method", *SHARED_KEYS):
            allowed = ["method", *SHARED_KEYS]
            raise ConfigError(unknown_option(key, allowed, "speculative_config with method auto"))
    return True


def _shared(entries: Sequence[Mapping[str, Any]]) -> Speculation:
    """The verification rule and the draft sampling, which all drafters share."""
    found: dict[str, Any] = {}
    for entry in entries:
        for key in SHARED_KEYS:
            if key in entry and found.setdefault(key, entry[key]) != entry[key]:
                raise ConfigError(f"{key} is both {found[key]!r} and {entry[key]!r}: all drafters share one.")
    rule = _rule(found)
    method = found.get("draft_sample_method", "probabilistic")
    if method not in SAMPLE_METHODS:
        raise ConfigError(f"draft_sample_method must be one of {', '.join(SAMPLE_METHODS)}, got {method!r}.")
    if method == "greedy":
        sampling = DraftSampling.GREEDY
    else:
        sampling = DraftSampling.COUPLED if RULES[rule].same_bytes else DraftSampling.INDEPENDENT
    return Speculation({}, rule, sampling)


def _rule(found: Mapping[str, Any]) -> str:
    """The verification rule, by our name or by vLLM's."""
    if "rejection_sample_method" in found:
        vllm_name = found["rejection_sample_method"]
        if "verification" in found or vllm_name not in RULE_NAMES:
            raise ConfigError(
                f"rejection_sample_method {vllm_name!r}: use standard or block, or leave it out and give "
                f"verification, one of {', '.join(RULES)}."
            )
        return RULE_NAMES[vllm_name]
    rule = found.get("verification", "pathwise")
    if rule not in RULES:
        raise ConfigError(f"verification must be one of {', '.join(RULES)}, got {rule!r}.")
    return str(rule)


def _drafter(entry: Mapping[str, Any], rule_takes_trees: bool, rule: str) -> tuple[str, DrafterConfig]:
    """One drafter's name, default plan and options."""
    if entry.get("model") == SHIPPED_HEAD:
        entry = {**SHIPPED, **entry}
    name = entry.get("method", "draft_model" if "model" in entry else None)
    method = find_method(name) if isinstance(name, str) else None
    if method is None:
        raise ConfigError(f"method must be one of {', '.join(method_names())}, or auto; got {name!r}.")
    plan = parse_plan(ConfigError, entry, None, name, method.trees)
    if plan.branching > 1 and not rule_takes_trees:
        raise ConfigError(
            f"branching is {plan.branching}, but {rule} verification takes chains only. "
            "Use branching 1, or verification 'traversal'."
        )
    options = options_of(name)
    method_options = {key: value for key, value in entry.items() if key not in PLAN_KEYS + SHARED_KEYS}
    for key in method_options:
        if key not in options.__dataclass_fields__:
            allowed = [*PLAN_KEYS, *SHARED_KEYS, *options.__dataclass_fields__]
            raise ConfigError(unknown_option(key, allowed, f"speculative_config with method {name}"))
    return name, DrafterConfig(plan, options(**method_options))
