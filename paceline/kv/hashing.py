"""Hashes of prompt prefixes, page by page: equal hashes in every process mean equal tokens from the root.

For routers, which do not have the pages. The prefix cache itself needs no hash: its index is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

HASH_BYTES = 8


def page_hashes(token_ids: Sequence[int], page_size: int, salt: str = "") -> list[int]:
    """The hash of each whole page of a prompt and all pages before it. Salts separate as in the KV cache."""
    parent = blake2b(salt.encode(), digest_size=HASH_BYTES).digest()
    tokens = np.asarray(token_ids, dtype="<i4").tobytes()
    page_bytes = 4 * page_size
    hashes = []
    for end in range(page_bytes, len(tokens) + 1, page_bytes):
        parent = blake2b(parent + tokens[end - page_bytes : end], digest_size=HASH_BYTES).digest()
        hashes.append(int.from_bytes(parent, "little"))
    return hashes
