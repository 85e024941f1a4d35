"""layerskip: the target's first layers, then its final norm and output head, draft (self-speculation).

The draft reads and writes the target's own keys and values of these layers; it has no KV cache of its own.
The pass that verifies a draft runs all layers over it, the first ones for the second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.draft.base import DrafterNeeds, Target, UnboundDrafter
from paceline.draft.model.draft_cache import TargetPages
from paceline.draft.model.model_drafter import ModelDrafter
from paceline.draft.model.vocabulary import trimmed_vocabulary
from paceline.errors import ConfigError
from paceline.options import check_integer, refuse_unknown

if TYPE_CHECKING:
    from paceline.kv.cache import KVCache


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class LayerSkipOptions:
    """The keys of speculative_config for method layerskip."""

    exit_layer: int | None = None  # layers that draft; None: usual_exit_layer

    def __post_init__(self) -> None:
        if self.exit_layer is not None:
            check_integer(ConfigError, "exit_layer", self.exit_layer, 1, None)


def usual_exit_layer(num_layers: int) -> int:
    """The default exit_layer: a quarter of the layers, as in models trained with LayerSkip."""
    return max(1, num_layers // 4)


class LayerSkipDrafter(ModelDrafter):
    """Drafts with the target's first layers, on the target's pages."""

    name = "layerskip"
    needs = DrafterNeeds(target_pages=True)
    Options = LayerSkipOptions

    @classmethod
    def load(cls, options: LayerSkipOptions, target: Target) -> UnboundDrafter:
        """The drafter with the first layers of the loaded target."""
        config = target.config
        if config.recurrent is not None:
            raise ConfigError(
                f"this {config.family} model has recurrent layers, whose states layerskip cannot take back "
                "after a rejected draft. Use another method, such as suffix."
            )
        exit_layer = options.exit_layer or usual_exit_layer(config.num_layers)
        remedy = f"The target has {config.num_layers} layers, and its first ones draft."
        check_integer(ConfigError, "exit_layer", exit_layer, 1, config.num_layers, remedy)
        layers = target.loaded.first_layers(exit_layer)

        def bind(kv: KVCache) -> LayerSkipDrafter:
            vocabulary, cache = trimmed_vocabulary(None, config.vocab_size), TargetPages(kv, target.loaded)
            return cls(layers, vocabulary, cache, vocab_size=config.vocab_size, sampling=target.sampling)

        return UnboundDrafter(cls.name, bind)
