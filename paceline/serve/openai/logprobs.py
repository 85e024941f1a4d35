"""Log-probabilities in OpenAI's formats (chat, completions) and in vLLM's format for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from paceline.core.detokenizer import TextTokenizer
from paceline.core.verdict import Logprob
from paceline.engine.outputs import TokenLogprobs

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], top: int, tokenizer: TextTokenizer
) -> dict[str, Any]:
    """The logprobs of a chat choice, or of one chunk of it."""

    def described(token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": logprob.decoded_token,
            "logprob": max(logprob.logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        likeliest = [described(*item) for item in likeliest_of(entry, top)]
        content.append({**described(token, entry[token]), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def likeliest_of(entry: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest tokens of an entry, best first. The sampled token may be missing."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= count][:count]


class CompletionLogprobs:
    """The logprobs of one completion choice, chunk by chunk, with offsets into the choice's text."""

    def __init__(self, tokenizer: TextTokenizer, top: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def take(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The logprobs of the next tokens. A prompt's first token has no entry (None)."""
        offsets = [self._next_offset(token) for token in token_ids]
        pairs = list(zip(token_ids, entries, strict=True))
        return {
            "tokens": [self._spelled(token) for token in token_ids],
            "token_logprobs": [entry and max(entry[token].logprob, LOWEST) for token, entry in pairs],
            "top_logprobs": [entry and self._likeliest(token, entry) for token, entry in pairs],
            "text_offset": offsets,
        }

    def _likeliest(self, token: int, entry: TokenLogprobs) -> dict[str, float]:
        likeliest = [
            *likeliest_of(entry, self._top),
            (token, entry[token]),
        ]  # always with the sampled token
        logprobs: dict[str, float] = {}
        for other, logprob in likeliest:
            logprobs.setdefault(self._spelled(other), max(logprob.logprob, LOWEST))
        return logprobs

    def _next_offset(self, token: int) -> int:
        offset = self._offset
        if not (self._skip_special and self._tokenizer.is_special(token)):
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offset

    def _spelled(self, token: int) -> str:
        """The token as text; parts of characters as `bytes:` and escapes, so that they can be told apart."""
        spelling = self._tokenizer.token_bytes(token)
        try:
            return spelling.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], top: int) -> list[dict[str, Any] | None]:
    """The logprobs of a prompt's tokens and of the `top` likeliest, by token id, in vLLM's format."""

    def shown(entry: TokenLogprobs) -> dict[str, Any]:
        prompt_token = next(iter(entry))  # the prompt's own token is the first
        return {
            str(token): _plain(logprob)
            for token, logprob in entry.items()
            if token == prompt_token or logprob.rank <= top
        }

    return [None if entry is None else shown(entry) for entry in entries]


def _plain(logprob: Logprob) -> dict[str, Any]:
    return {
        "logprob": max(logprob.logprob, LOWEST),
        "rank": logprob.rank,
        "decoded_token": logprob.decoded_token,
    }
