"""The routes file (TOML): real models with their options, and virtual models over them.

All mistakes are reported before a model is loaded: unknown names and options, circles, wrong regular
expressions, weights that are not positive.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig, option_names
from paceline.errors import ConfigError
from paceline.options import check_integer, nearest, unknown_option
from paceline.serve.routes.kinds import KINDS, Route, Rule
from paceline.serve.tools.formats import named_format

SECTIONS = ("models", "routes", "default")
OF_SERVER = ("max_queue", "tool_call_parser")  # options of `paceline serve` that each model may have
MAX_NAME = 256  # characters


@dataclass(frozen=True)
class ModelEntry:
    """A real model of the file."""

    config: EngineConfig
    max_queue: int | None = None  # None: the server's
    tool_call_parser: str | None = None  # None: the server's


@dataclass(frozen=True)
class RouteTable:
    """The virtual models, over the names of real ones. Every name is known, and there are no circles."""

    models: tuple[str, ...]  # real ones
    routes: Mapping[str, Route]
    default: str  # for requests that name no model

    def __post_init__(self) -> None:
        for name in (*self.models, *self.routes):
            if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
                raise ConfigError(f"a name must be 1 to {MAX_NAME} printable characters, got {name!r:.80}.")
        for name in self.routes:
            if name in self.models:
                raise ConfigError(f"{name!r} is the name of a model and of a route: rename one.")
        self._check_known(self.default, "default")
        for name, route in self.routes.items():
            for target in route.targets:
                self._check_known(target, f"routes.{name}")
        for name in self.routes:
            self._check_circle(name, ())

    @staticmethod
    def of(*names: str) -> RouteTable:
        """A table of real models only; the first is the default."""
        return RouteTable(names, {}, names[0])

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use."""
        return (*self.models, *self.routes)

    def reachable(self, name: str) -> tuple[str, ...]:
        """The real models that a name may lead to."""
        if name not in self.routes:
            return (name,)
        found = [model for target in self.routes[name].targets for model in self.reachable(target)]
        return tuple(dict.fromkeys(found))

    def _check_known(self, name: object, where: str) -> None:
        if not isinstance(name, str) or name not in self.names:
            hint = nearest(name, self.names) if isinstance(name, str) else ""
            known = hint or f". There are {', '.join(self.names)}."
            raise ConfigError(f"{where} names {name!r}, which is neither a model nor a route{known}")

    def _check_circle(self, name: str, before: tuple[str, ...]) -> None:
        if name in before:
            circle = " -> ".join((*before[before.index(name) :], name))
            raise ConfigError(f"routes refer to each other in a circle: {circle}. Break it at one of them.")
        for target in self.routes[name].targets if name in self.routes else ():
            self._check_circle(target, (*before, name))


@dataclass(frozen=True)
class RoutesFile:
    """What a routes file declares."""

    table: RouteTable
    models: Mapping[tuple[str, ...], ModelEntry]  # by the names that clients may use


def read_routes(path: str, common: Mapping[str, Any], together: bool = True) -> RoutesFile:
    """The routes file at `path`. `common` are engine options for models that do not set them. `together`: the
    models share the memory of one GPU."""
    data = _parse(path)
    for key in data:
        if key not in SECTIONS:
            raise ConfigError(f"--routes {path}: {unknown_option(key, SECTIONS, 'a routes file')}")
    try:
        declared, routes = _tables(data, "models"), _tables(data, "routes")
        if not declared:
            raise ConfigError('there is no model: add [models.NAME] with model = "PATH OR ALIAS".')
        parsed = {name: _route(name, options) for name, options in routes.items()}
        table = RouteTable(tuple(declared), parsed, data.get("default", next(iter(declared))))
        models = {name: _model(name, options, common) for name, options in declared.items()}
    except ConfigError as error:
        raise ConfigError(f"--routes {path}: {error}") from None
    if together:
        models = _with_shares(models, declared)
    return RoutesFile(table, {(name,): entry for name, entry in models.items()})


def _parse(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--routes {path} cannot be read ({error}). Give a TOML file.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--routes {path} is not TOML: {error}.") from None


def _tables(data: Mapping[str, Any], section: str) -> dict[str, dict[str, Any]]:
    tables = data.get(section, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{section} must be tables: write [{section}.NAME] above the options of each.")
    return tables


def _route(name: str, options: Mapping[str, Any]) -> Route:
    kind = options.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"routes.{name}: kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    others = {option: value for option, value in options.items() if option != "kind"}
    for needed in fields(KINDS[kind]):
        if needed.default is MISSING and needed.name not in others:
            raise ConfigError(f"routes.{name}: a {kind} route needs `{needed.name}`.")
    try:
        if "rules" in others:
            others["rules"] = _rules(others["rules"])
        return KINDS[kind](**others)
    except ConfigError as error:
        raise ConfigError(f"routes.{name}: {error}") from None


def _rules(given: Any) -> tuple[Rule, ...]:
    if not isinstance(given, list) or not all(isinstance(rule, dict) for rule in given):
        raise ConfigError("rules must be tables: write [[routes.NAME.rules]] above each.")
    for number, rule in enumerate(given, 1):
        if "to" not in rule:
            raise ConfigError(f'rule {number} needs `to`, the model that it leads to, such as to = "large".')
    return tuple(Rule(**rule) for rule in given)


def _model(name: str, options: Mapping[str, Any], common: Mapping[str, Any]) -> ModelEntry:
    known = (*option_names(), *OF_SERVER)
    for option in options:
        if option not in known:
            raise ConfigError(unknown_option(option, known, f"models.{name}"))
    if "model" not in options:
        raise ConfigError(f"models.{name} needs `model`: an alias, a file, a folder or a hub id.")
    engine = {option: value for option, value in options.items() if option not in OF_SERVER}
    try:
        if "max_queue" in options:
            check_integer(ConfigError, "max_queue", options["max_queue"], 0, 1_000_000)
        if "tool_call_parser" in options:
            named_format(options["tool_call_parser"])
        config = EngineConfig.from_options(**{**common, **engine})
    except ConfigError as error:
        raise ConfigError(f"models.{name}: {error}") from None
    return ModelEntry(config, options.get("max_queue"), options.get("tool_call_parser"))


def _with_shares(
    models: Mapping[str, ModelEntry], declared: Mapping[str, Mapping[str, Any]]
) -> dict[str, ModelEntry]:
    """The models with equal shares of a GPU's memory, where the file sets none.

    A model's gpu_memory_utilization counts what those before it have taken, so the shares add up.
    """
    on_gpu = [name for name, entry in models.items() if entry.config.backend.name == "cuda"]
    shared = dict(models)
    for number, name in enumerate(on_gpu, 1):
        if "gpu_memory_utilization" not in declared[name]:
            config = models[name].config
            share = config.cache.gpu_memory_utilization * number / len(on_gpu)
            cache = replace(config.cache, gpu_memory_utilization=share)
            shared[name] = replace(models[name], config=replace(config, cache=cache))
    return shared
