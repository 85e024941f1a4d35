"""Vocabularies that are small enough to try every token of, and rich enough to cut a text in several ways."""

from __future__ import annotations

import re
from collections.abc import Sequence

# what JSON is made of in several lengths, so that a text has many tokenizations and one that is canonical
PIECES = [
    '{"', '"}', '":', '": ', '", "', '"name', "name", "na", "am", "true", "false", "null", '{"name": "', "}}",
    "10", "00", "abc", "ab", "bc", " a", " b", "yes", "no", "ye", "not", "tri", "angle", "triangle", "_area",
    "é", "ö", ", ", '["', '"]', "[[", "]]", "  ", "\n", "<tool>",
]  # fmt: skip


class PieceTokenizer:
    """Ids 0 and 1 end a text, 2 begins one, 3 to 258 are bytes, then pieces; the last ids have no token.

    The canonical tokens of a text are the longest that fit, from left to right. Special tokens are
    spelled like text, and encode finds them in a text, as those of real models do.
    """

    eos_ids = frozenset({0, 1})
    special = ("<eos>", "<end>", "<bos>")
    vocab_size = 259 + len(PIECES) + 5

    def __init__(self) -> None:
        bytes_of = [text.encode() for text in self.special] + [bytes([byte]) for byte in range(256)]
        self._bytes = bytes_of + [piece.encode() for piece in PIECES]
        self._ids = {piece: 259 + number for number, piece in enumerate(map(str.encode, PIECES))}
        self._longest = max(map(len, self._ids))

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        ids = [2] * add_special_tokens
        for part in re.split("(<eos>|<end>|<bos>)", text):
            ids += [self.special.index(part)] if part in self.special else self._plain(part.encode())
        return ids

    def _plain(self, data: bytes) -> list[int]:
        ids: list[int] = []
        while data:
            lengths = range(min(self._longest, len(data)), 1, -1)
            length = next((length for length in lengths if data[:length] in self._ids), 1)
            ids.append(self._ids[data[:length]] if length > 1 else 3 + data[0])
            data = data[length:]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(token) for token in ids if token > 2).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id < 3

    def apply_chat_template(self, messages, add_generation_prompt=True, tools=None) -> str:
        return "".join(str(message) for message in messages)
