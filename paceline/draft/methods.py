"""The table of drafting methods, and how a drafter is made from its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from paceline.constrain.constraint import MAX_FORCED
from paceline.core.trees import DraftPlan
from paceline.draft import plugins
from paceline.draft.base import NoOptions, Target, UnboundDrafter
from paceline.models.heads.shipped import SHIPPED_HEAD


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


@dataclass(frozen=True)
class DrafterConfig:
    """One drafter to load, and its plan for requests that do not set one."""

    plan: DraftPlan
    options: Any  # the method's own


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


def options_of(name: str) -> type[Any]:
    """The dataclass of a method's own keys of speculative_config."""
    _, drafter_class = _method_and_class(name)
    options: type[Any] = getattr(drafter_class, "Options", NoOptions)
    return options


def load_drafter(name: str, config: DrafterConfig, target: Target) -> UnboundDrafter:
    """The loaded drafter of this name. ConfigError if it is of another package, and cannot be loaded."""
    method, drafter_class = _method_and_class(name)
    options = () if isinstance(config.options, NoOptions) else (config.options,)
    load = getattr(drafter_class, "load", None)
    make = partial(load, config.options, target) if load else partial(drafter_class, *options)
    if name not in METHODS:
        call = f"{drafter_class.__name__}({'options' if options else ''})"
        make = partial(plugins.make, name, call, make, method.paged)
    made = make()
    return made if method.paged else UnboundDrafter(name, lambda kv: made)


def find_files(drafters: Mapping[str, DrafterConfig]) -> None:
    """Fetch the heads and draft models that are on the hub; PacelineError for one that is not there."""
    for name, config in drafters.items():
        argument = METHODS[name].argument if name in METHODS else None
        named = None if argument is None else getattr(config.options, argument.option, None)
        if argument is not None and argument.find is not None and named:
            argument.find(name, named)


def _method_and_class(name: str) -> tuple[Method, Any]:
    """The row of a method that exists, and its drafter's class."""
    method = find_method(name)
    assert method is not None
    if name in METHODS:
        return method, getattr(import_module(method.module), method.drafter)
    return method, plugins.drafter_class(name, method.module, method.drafter)
