"""Engines over a KV cache of their own, whatever drafters they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.backends.base import Backend
from paceline.core.detokenizer import TextTokenizer
from paceline.draft.base import Drafter, UnboundDrafter
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine, target_cache
from paceline.kv.cache import KVCache


class Later:
    """A drafter that exists once an engine is made: from then on this has all of its attributes."""

    def __init__(self, unbound: UnboundDrafter) -> None:
        self.__dict__.update(name=unbound.name, unbound=unbound, drafter=None, waiting={})

    def bind(self, kv: KVCache) -> Drafter:
        """The drafter, bound to this cache."""
        drafter = self.unbound.bind(kv)
        for name, value in self.waiting.items():
            setattr(drafter, name, value)
        self.__dict__["drafter"] = drafter
        return drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def __setattr__(self, name: str, value: object) -> None:
        if self.drafter is None:  # it gets them when it is made
            self.waiting[name] = value
        else:
            setattr(self.drafter, name, value)


AnyDrafter = Drafter | UnboundDrafter | Later


def new_engine(
    backend: Backend,
    tokenizer: TextTokenizer,
    limits: Limits,
    *,
    num_pages: int,
    num_window_pages: int | None = None,
    enable_prefix_caching: bool = True,
    drafters: Mapping[str, AnyDrafter] | None = None,
    **options: Any,
) -> Engine:
    """An engine with these drafters. Those that are not bound yet are bound to its cache."""
    kv = target_cache(backend, limits, num_pages, enable_prefix_caching, num_window_pages)
    bound = {
        name: drafter.bind(kv) if isinstance(drafter, UnboundDrafter | Later) else drafter
        for name, drafter in (drafters or {}).items()
    }
    return Engine(backend, tokenizer, limits, kv, drafters=bound, **options)
