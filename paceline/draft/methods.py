"""The table of drafting methods, and the parsing of speculative_config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from paceline.constrain.constraint import MAX_FORCED
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft import plugins
from paceline.draft.base import DraftSampling, NoOptions, Target, UnboundDrafter
from paceline.errors import ConfigError, PacelineError
from paceline.models.heads.shipped import DEFAULT_METHOD, SHIPPED_HEAD
from paceline.options import check_integer, nearest, unknown_option
from paceline.verify.rules import RULES

MAX_NODES = 1024  # nodes of a draft, and the limit of branching and depth


@dataclass(frozen=True)
class Argument:
    """The argument of a method's short form, after the colon: eagle3:PATH."""

    option: str  # the key of speculative_config that it sets
    shown: str  # its name in error messages
    read: Callable[[str], Any] = str
    find: Callable[[str, str], object] | None = None  # of a file: raises if it is not there. Method, value


def _read_path(text: str) -> str:
    """The path. ValueError for a bare number, which is meant as a length: a folder of that name is ./3."""
    if text.isdecimal():
        raise ValueError(text)
    return text


def _find_head(method: str, name: str) -> None:
    from paceline.models.heads.registry import resolve_head

    if not name.endswith(SHIPPED_HEAD):  # which one that is depends on the target
        resolve_head(name, method)


def _find_model(method: str, name: str) -> None:
    from paceline.models.registry import resolve

    resolve(name)


HEAD = Argument("model", "PATH", _read_path, _find_head)
MODEL = Argument("model", "PATH", _read_path, _find_model)


@dataclass(frozen=True)
class Method:
    """One row of the table. The class is imported when the method is used.

    Other packages add a row by an entry point of the group `paceline.drafters`, see docs/extend/drafter.md.
    The class derives from `Drafter`. It may have `Options`, a frozen dataclass of its own keys of
    speculative_config, and `load(options, target)`, a class method that makes the drafter. Without `load` its
    constructor is called with the options, or without arguments if it has none.
    """

    module: str
    drafter: str  # the class
    num_speculative_tokens: int  # the default
    trees: bool  # can draft trees, not only chains
    on_demand: bool = False  # needs only texts: requests may name it though it is not configured
    argument: Argument | None = None  # of the short form
    paged: bool = False  # it works on pages of the KV cache: `load` gives an UnboundDrafter


METHODS: dict[str, Method] = {
    "ngram": Method(
        "paceline.draft.lookup.ngram", "NgramDrafter", num_speculative_tokens=6, trees=False, on_demand=True
    ),
    "suffix": Method(
        "paceline.draft.lookup.suffix", "SuffixDrafter", num_speculative_tokens=7, trees=True, on_demand=True
    ),
    "draft_model": Method(
        "paceline.draft.model.draft_model",
        "DraftModelDrafter",
        num_speculative_tokens=4,
        trees=True,
        argument=MODEL,
        paged=True,
    ),
    "eagle3": Method(
        "paceline.draft.heads.eagle",
        "Eagle3Drafter",
        num_speculative_tokens=7,
        trees=True,
        argument=HEAD,
        paged=True,
    ),
    "eagle": Method(
        "paceline.draft.heads.eagle",
        "EagleDrafter",
        num_speculative_tokens=7,
        trees=True,
        argument=HEAD,
        paged=True,
    ),
    "dflash": Method(
        "paceline.draft.heads.block",
        "DFlashDrafter",
        num_speculative_tokens=7,
        trees=True,
        argument=HEAD,
        paged=True,
    ),
    "dspark": Method(
        "paceline.draft.heads.block",
        "DSparkDrafter",
        num_speculative_tokens=7,
        trees=True,
        argument=HEAD,
        paged=True,
    ),
    "medusa": Method(
        "paceline.draft.heads.medusa",
        "MedusaDrafter",
        num_speculative_tokens=5,
        trees=True,
        argument=HEAD,
        paged=True,
    ),
    "mtp": Method("paceline.draft.heads.mtp", "MtpDrafter", num_speculative_tokens=2, trees=True, paged=True),
    "assistant": Method(
        "paceline.draft.heads.assistant",
        "AssistantDrafter",
        num_speculative_tokens=4,
        trees=True,
        argument=HEAD,
        paged=True,
    ),
    "layerskip": Method(
        "paceline.draft.model.layerskip",
        "LayerSkipDrafter",
        num_speculative_tokens=4,
        trees=True,
        argument=Argument("exit_layer", "LAYERS", int),
        paged=True,
    ),
    "grammar": Method(
        "paceline.draft.grammar", "GrammarDrafter", num_speculative_tokens=MAX_FORCED, trees=False
    ),
    "hybrid": Method(
        "paceline.draft.hybrid", "HybridDrafter", num_speculative_tokens=7, trees=True, paged=True
    ),
}

AUTO = "auto"  # not a method: the controller chooses among the methods listed with it
OFF = "off"  # nor is this: plain decoding
SHORT_NAMES = {"model": "draft_model"}
SHIPPED = {"method": DEFAULT_METHOD, "model": SHIPPED_HEAD}  # what "shipped" is short for
PLAN_KEYS = ("method", "num_speculative_tokens", "branching", "depth")  # requests may set these too
SHARED_KEYS = ("verification", "rejection_sample_method", "draft_sample_method")  # the same for all drafters
SAMPLE_METHODS = ("probabilistic", "greedy")  # values of draft_sample_method
RULE_NAMES = {"standard": "rejection", "block": "block"}  # vLLM's rejection_sample_method


@dataclass(frozen=True)
class DrafterConfig:
    """One drafter to load, and its plan for requests that do not set one."""

    plan: DraftPlan
    options: Any  # the method's own


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


def find_method(name: str) -> Method | None:
    """The method of this name: built in, or of an installed package; None if there is none.

    ConfigError if several packages have it, or if its package cannot be used.
    """
    plugin = plugins.load(name, built_in=name in (*METHODS, AUTO, OFF, *SHORT_NAMES))
    if plugin is not None and not isinstance(plugin, Method):
        raise plugins.plugin_error(
            name,
            f"the entry point must name a Method, not {plugin!r:.60}",
            "point it to a paceline.draft.methods.Method",
        )
    return plugin or METHODS.get(name)


def method_names() -> list[str]:
    """The names of all methods, those of installed packages last."""
    return list(dict.fromkeys([*METHODS, *plugins.installed()]))


def load_drafter(name: str, config: DrafterConfig, target: Target) -> UnboundDrafter:
    """The loaded drafter of this name. ConfigError if it is of another package, and cannot be loaded."""
    method, drafter_class = _method_and_class(name)
    options = () if isinstance(config.options, NoOptions) else (config.options,)
    if hasattr(drafter_class, "load"):
        load = partial(drafter_class.load, config.options, target)
    else:
        load = partial(drafter_class, *options)
    if name not in METHODS:
        call = f"{drafter_class.__name__}({'options' if options else ''})"
        load = partial(plugins.make, name, call, load, method.paged)
    made = load()
    return made if method.paged else UnboundDrafter(name, lambda kv: made)


def find_files(drafters: Mapping[str, DrafterConfig]) -> None:
    """Fetch the heads and draft models that are on the hub; PacelineError for one that is not there."""
    for name, config in drafters.items():
        argument = METHODS[name].argument if name in METHODS else None
        named = None if argument is None else getattr(config.options, argument.option, None)
        if argument is not None and argument.find is not None and named:
            argument.find(name, named)


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
    _, drafter_class = _method_and_class(name)
    options = getattr(drafter_class, "Options", NoOptions)
    method_options = {key: value for key, value in entry.items() if key not in PLAN_KEYS + SHARED_KEYS}
    for key in method_options:
        if key not in options.__dataclass_fields__:
            allowed = [*PLAN_KEYS, *SHARED_KEYS, *options.__dataclass_fields__]
            raise ConfigError(unknown_option(key, allowed, f"speculative_config with method {name}"))
    return name, DrafterConfig(plan, options(**method_options))


def _method_and_class(name: str) -> tuple[Method, Any]:
    """The row of a method that exists, and its drafter's class."""
    method = find_method(name)
    assert method is not None
    if name in METHODS:
        return method, getattr(import_module(method.module), method.drafter)
    return method, plugins.drafter_class(name, method.module, method.drafter)
