"""An app around a model that echoes: its answer is the last user message.

Its vocabulary is the 256 bytes and a few special tokens, so that it can give every text as an answer,
and a grammar can make it give others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
import tokenizers

from paceline.control.controller import FixedController
from paceline.core.arrays import Float32Array
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.models.tokenizer import Tokenizer, byte_alphabet
from paceline.serve.http.app import make_app
from paceline.serve.service import Service
from tests.engines import new_engine
from tests.toy import ToyBackend

Result = TypeVar("Result")

# special tokens
END, USER, ANSWER = "<|end|>", "<|user|>", "<|answer|>"
FAILS = 7  # the byte of the bell character
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)


def byte_tokenizer(
    template: str = PLAIN_TEMPLATE, special: Sequence[str] = (), added: Sequence[str] = (), end: str = END
) -> Tokenizer:
    """A tokenizer whose tokens are bytes, the `special` tokens with `end`, and ordinary added tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_alphabet(), []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([end, USER, ANSWER, *special])
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
    return Tokenizer(backend, {"eos_token": end}, [backend.token_to_id(end)], template)


class EchoBackend(ToyBackend):
    """Its most likely next token is that of the last user message at the same position, then the end.

    It fails on a text with the byte FAILS.
    """

    def __init__(self, tokenizer: Tokenizer, max_rows: int) -> None:
        super().__init__(max_rows=max_rows, vocab=tokenizer.vocab_size, nan_after=FAILS)
        self._ids = {text: tokenizer.id_of(text) for text in (END, USER, ANSWER)}

    def logits_of(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Float32Array:
        path = tokens.tolist()
        logits = super().logits_of(tokens, positions) * np.float32(0.01)
        if self._ids[ANSWER] in path:
            answer = _last(path, self._ids[ANSWER]) + 1
            start = _last(path[:answer], self._ids[USER]) + 1
            said = path[start : path.index(self._ids[END], start)]
            place = len(path) - answer
            logits[said[place] if place < len(said) else self._ids[END]] = 50
        return logits


def _last(path: list[int], token: int | None) -> int:
    return len(path) - 1 - path[::-1].index(token)


def echo_engine(tokenizer: Tokenizer, max_model_len: int = 4096) -> Engine:
    """An engine over the echo model."""
    return new_engine(
        EchoBackend(tokenizer, max_rows=256),
        tokenizer,
        Limits(tokenizer.vocab_size, max_model_len, 16, 256),
        num_pages=4000,
        enable_prefix_caching=True,
        seed=0,
        controller=FixedController(),
        drafters={},
    )


@asynccontextmanager
async def echo_app(tokenizer: Tokenizer | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app."""
    tokenizer = tokenizer or byte_tokenizer()
    front = AsyncEngine(echo_engine(tokenizer), tokenizer, max_queue=100)
    front.start()
    service = Service(front, tokenizer, ("echo",))
    transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://echo", timeout=60) as client:
            yield client
    finally:
        await front.stop()
        service.workers.shutdown()


def with_echo(
    work: Callable[[httpx.AsyncClient], Awaitable[Result]], tokenizer: Tokenizer | None = None
) -> Result:
    """The result of `work` with a client of the app."""

    async def main() -> Result:
        async with echo_app(tokenizer) as client:
            return await asyncio.wait_for(work(client), 60)

    return asyncio.run(main())


def ask(path: str, tokenizer: Tokenizer | None = None, **body: Any) -> httpx.Response:
    """The answer to one request."""

    async def work(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body)

    return with_echo(work, tokenizer)
