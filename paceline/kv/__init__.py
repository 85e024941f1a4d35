"""Keys and values: pages, prefix reuse, commit of the accepted path."""

from paceline.kv.cache import KVCache

__all__ = ["KVCache"]
