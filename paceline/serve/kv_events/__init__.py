"""KV events: tell a gateway which blocks the prefix cache holds, in vLLM's wire format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.extras import needs_extra
from paceline.kv.cache import KVCache
from paceline.serve.kv_events.observer import KVEvents
from paceline.serve.kv_events.options import KVEventsOptions

if TYPE_CHECKING:
    from paceline.serve.kv_events.publisher import Publisher


@contextmanager
def publishing(options: KVEventsOptions | None) -> Iterator[Publisher | None]:
    """A publisher whose sockets are bound, within the context; None without options."""
    if options is None:
        yield None
        return
    with needs_extra("gateway", "`--kv-events-endpoint`"):
        from paceline.serve.kv_events.publisher import Publisher
    publisher = Publisher(options)
    try:
        yield publisher
    finally:
        publisher.close()


def observe(kv: KVCache, publisher: Publisher) -> KVEvents:
    """The observer that publishes what this cache stores and evicts. It must also see the engine's steps."""
    publisher.start()
    events = KVEvents(publisher.send, kv.page_size, publisher.options.publish_salted)
    kv.pages.observe(events)
    return events
