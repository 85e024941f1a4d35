"""The KV cache: pages, prefix caching, commit of the accepted path."""

from paceline.kv.cache import KVCache

__all__ = ["KVCache"]
