"""Readers of the kinds of layers in a config.json: which of them have a window."""

from __future__ import annotations

from collections.abc import Callable

from paceline.models.families.fields import Fields

SLIDING, CHUNKED, FULL = (
    "sliding_attention",
    "chunked_attention",
    "full_attention",
)  # as transformers names them
Windows = tuple[int | None, ...]


def no_windows(fields: Fields, num_layers: int) -> Windows:
    return ()


def everywhere(fields: Fields, num_layers: int) -> Windows:
    """The same window in every layer, if there is one."""
    return (fields.integer("sliding_window"),) * num_layers if fields.has("sliding_window") else ()


def mistral(fields: Fields, num_layers: int) -> Windows:
    """The same window in every layer. A config without the key means 4096; null means none."""
    return everywhere(fields, num_layers) if "sliding_window" in fields.values else (4096,) * num_layers


def ministral(fields: Fields, num_layers: int) -> Windows:
    """As mistral's, in the layers that layer_types lists if it is there."""
    windows, kinds = mistral(fields, num_layers), layer_kinds(fields, num_layers)
    if not windows or kinds is None:
        return windows
    return tuple(window if kind == SLIDING else None for window, kind in zip(windows, kinds, strict=True))


def qwen_moe(fields: Fields, num_layers: int) -> Windows:
    return everywhere(fields, num_layers) if fields.flag("use_sliding_window", False) else ()


def qwen(fields: Fields, num_layers: int) -> Windows:
    """A window in the layers from max_window_layers on, or in those that layer_types lists."""
    if not fields.flag("use_sliding_window", False):
        return ()
    window = fields.integer("sliding_window", 4096)
    first = fields.integer("max_window_layers", 28, least=0)
    kinds = layer_kinds(fields, num_layers)
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == SLIDING else None for kind in kinds)


def layer_kinds(fields: Fields, num_layers: int, other: str = SLIDING) -> list[str] | None:
    """The kind of every layer, full attention or the `other` one, if the configuration lists them."""
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(kind in (other, FULL) for kind in kinds)
    ):
        raise fields.wrong("layer_types", f"{num_layers} entries, each {FULL} or {other}")
    return kinds


def patterned(
    every: int, default_window: int = 4096, period_key: str = "sliding_window_pattern"
) -> Callable[[Fields, int], Windows]:
    """Windows in the layers that layer_types lists; without it, in all but every `every`-th layer."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        window = fields.integer("sliding_window", default_window)
        pattern = fields.integer(period_key, every)
        usual = [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(num_layers)]
        kinds = layer_kinds(fields, num_layers) or usual
        return tuple(window if kind == SLIDING else None for kind in kinds)

    return windows


def smollm3(fields: Fields, num_layers: int) -> Windows:
    """Windows in the layers with rope, if the configuration uses any."""
    if not fields.flag("use_sliding_window", False):
        return ()
    return patterned(fields.integer("no_rope_layer_interval", 4))(fields, num_layers)


def exaone4(fields: Fields, num_layers: int) -> Windows:
    """Windows in all but every fourth layer; the hub's files also write this as LLLG."""
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        return ()
    pattern = fields.values.get("sliding_window_pattern")
    if isinstance(pattern, str) and set(pattern) == {"L", "G"} and pattern.index("G") == len(pattern) - 1:
        fields = Fields({**fields.values, "sliding_window_pattern": len(pattern)}, fields.source)
    return patterned(4)(fields, num_layers)


def listed(default_window: int) -> Callable[[Fields, int], Windows]:
    """Windows in the layers that layer_types lists; without it, in none."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        kinds = layer_kinds(fields, num_layers)
        return () if kinds is None else _windows_of(fields, kinds, default_window)

    return windows


def after_full(every: int, default_window: int) -> Callable[[Fields, int], Windows]:
    """Windows in the layers that layer_types lists; without it, in all but the first of every `every`."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        usual = [SLIDING if layer % every else FULL for layer in range(num_layers)]
        return _windows_of(fields, layer_kinds(fields, num_layers) or usual, default_window)

    return windows


def qwen2_moe(fields: Fields, num_layers: int) -> Windows:
    """Windows in the layers that layer_types lists; without it, in every other of the first ones."""
    if not fields.flag("use_sliding_window", False):
        return ()
    first = fields.integer("max_window_layers", 28, least=0)
    usual = [FULL if layer % 2 or layer >= first else SLIDING for layer in range(num_layers)]
    return _windows_of(fields, layer_kinds(fields, num_layers) or usual, 4096)


def cohere2(fields: Fields, num_layers: int) -> Windows:
    """Windows as in Cohere 2; the first dense layers count by themselves."""
    dense = fields.integer("first_k_dense_replace", 0, least=0, most=num_layers)
    if fields.has("layer_types") or not dense:
        return patterned(4)(fields, num_layers)
    first = patterned(1, period_key="prefix_dense_sliding_window_pattern")(fields, dense)
    return first + patterned(4)(fields, num_layers - dense)


def _windows_of(fields: Fields, kinds: list[str], default_window: int) -> Windows:
    """The window of each layer; null means none."""
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        return ()
    window = fields.integer("sliding_window", default_window)
    return tuple(window if kind == SLIDING else None for kind in kinds)
