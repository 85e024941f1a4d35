"""KVEvents: what the prefix cache stores and evicts, as the events that vLLM publishes.

    prefix cache -- stored, removed -->  KVEvents  -- one batch per step -->  publisher

A block's hash is a chain: 64 bits of the SHA-256 over the parent's hash and the block's tokens are
published. It depends on nothing but the tokens (and the salt), so equal blocks of two replicas have equal
hashes. The cache itself trusts no hash: a collision could only mislead a gateway, never change an answer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.engine.engine import Delta

Event: TypeAlias = dict[str, Any]  # its fields in the order of vLLM's struct, "type" first

MEDIUM = "GPU"  # vLLM's word for the memory that passes read, also where that is the CPU's
ROOT = b"paceline"


def all_blocks_cleared() -> Event:
    """The event of an empty cache."""
    return {"type": "AllBlocksCleared"}


def block_removed(block_hash: int) -> Event:
    """The event of an evicted block."""
    return {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": MEDIUM}


def block_stored(block_hash: int, parent: int | None, tokens: Sequence[int], block_size: int) -> Event:
    """The event of a stored block. Blocks that follow it may be added, with their hashes and tokens."""
    return {
        "type": "BlockStored",
        "block_hashes": [block_hash],
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
    }


class KVEvents:
    """An observer of the prefix cache and of the engine's steps. All calls come from the engine's thread."""

    def __init__(self, send: Callable[[list[Event]], None], page_size: int, publish_salted: bool) -> None:
        """`send` takes the events of a step, in order."""
        self._send = send
        self._page_size = page_size
        self._publish_salted = publish_salted
        self._digests: dict[int, bytes] = {}  # of published blocks, by serial number
        # How many indexed pages have a hash. It is 2 only after a failed step: its pages leave the index, and
        # their descendants stay there out of reach while equal ones are added.
        self._copies: Counter[bytes] = Counter()
        self._events: list[Event] = [all_blocks_cleared()]  # an earlier process may have had this address
        self._flush()

    # --- the prefix cache's observer ---

    def stored(self, serial: int, parent: int | str, tokens: Sequence[int]) -> None:
        """A page was indexed. `parent` is a serial number; at the root, the salt."""
        if isinstance(parent, str):
            if parent and not self._publish_salted:
                return
            before = hashlib.sha256(ROOT + parent.encode()).digest()
        elif (found := self._digests.get(parent)) is None:  # its root is salted
            return
        else:
            before = found
        digest = hashlib.sha256(before + array("q", tokens).tobytes()).digest()
        self._digests[serial] = digest
        self._copies[digest] += 1
        if self._copies[digest] == 1:
            self._add_stored(_number(digest), None if isinstance(parent, str) else _number(before), tokens)

    def removed(self, serial: int) -> None:
        """A page has left the index."""
        digest = self._digests.pop(serial, None)
        if digest is None:
            return
        self._copies[digest] -= 1
        if self._copies[digest] == 0:
            del self._copies[digest]
            self._events.append(block_removed(_number(digest)))

    def _add_stored(self, block_hash: int, parent: int | None, tokens: Sequence[int]) -> None:
        """Add a block: to the last event, if it continues that, as the blocks of one prompt do."""
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockStored" and last["block_hashes"][-1] == parent:
            last["block_hashes"].append(block_hash)
            last["token_ids"].extend(tokens)
        else:
            self._events.append(block_stored(block_hash, parent, tokens, self._page_size))

    # --- the engine's observer ---

    def step(self, stats: StepStats, deltas: Sequence[Delta]) -> None:
        self._flush()

    def aborted(self, requests: Sequence[Request]) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._events:
            self._send(self._events)
            self._events = []


def _number(digest: bytes) -> int:
    """The published part of a hash: its last 64 bits, as vLLM takes them."""
    return int.from_bytes(digest[-8:], "big")
