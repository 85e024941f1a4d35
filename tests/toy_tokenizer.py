"""The toy model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.models.tokenizer import TooManyTokens

VOCAB = 97


class ToyTokenizer:
    """Ids are letters, special tokens or single bytes: id 0 is end-of-sequence, 1 is special."""

    eos_ids = frozenset({0})
    bos_id = 1
    vocab_size = VOCAB
    chat_template = None
    tool_template = None
    template_variables: frozenset[str] = frozenset()
    special_tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}  # noqa: RUF012

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        count = add_special_tokens + len(text)
        if most is not None and count > most:
            raise TooManyTokens(count, most, exact=True)
        return [1] * add_special_tokens + [2 + ord(letter) % 64 for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [token for token in ids if not (skip_special_tokens and self.is_special(token))]
        return b"".join(self.token_bytes(token) for token in kept).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 2:
            return (b"<eos>", b"<bos>")[token_id]
        if token_id < 66:
            return bytes([32 + token_id])
        return bytes([0xC3]) if token_id % 3 == 0 else bytes([0x80 + token_id - 66])  # halves of characters

    def is_special(self, token_id: int) -> bool:
        return token_id < 2

    def id_of(self, token: str) -> int | None:
        return {"<eos>": 0, "<bos>": 1}.get(token)

    def apply_chat_template(
        self,
        messages: Sequence[object],
        add_generation_prompt: bool = True,
        tools: object = None,
        continue_final_message: bool = False,
        chat_template_kwargs: object = None,
    ) -> str:
        return "".join(str(message) for message in messages)
