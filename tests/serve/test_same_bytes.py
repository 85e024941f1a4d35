"""Over HTTP with a seed: the offline bytes, with and without drafts, streaming and other requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.server.process import ServerProcess
from paceline import LLM, SamplingParams
from paceline.bench.servers.client import Answer, Server, post
from tests.large import LARGE
from tests.serve.conftest import MODEL

pytestmark = pytest.mark.real

COMPANY = 17  # requests at once: each one among 16 others
TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
CHAT = [
    {"role": "user", "content": "Count from one to ten."},
    {"role": "assistant", "content": "one, two, three, four, five, six, seven, eight, nine, ten"},
    {"role": "user", "content": "Again, please."},
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 0.8, "seed": 12, "top_k": 30, "top_p": 0.9},
    {"temperature": 1.0, "seed": 13, "min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 0.8, "seed": 14, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0, "logit_bias": {"28": -5, "1003": -5}, "min_tokens": 16},
    {"temperature": 0.8, "seed": 15, "stop": ["return", "\n\n\n"], "ignore_eos": True},
    {"temperature": 0.8, "seed": 16, "stop_token_ids": [198], "skip_special_tokens": False},
]
TOKENS = 18  # more than a page
SPECULATIVE = ["off", "suffix", {"method": "ngram", "num_speculative_tokens": 4}]


@dataclass(frozen=True)
class Case:
    """One request: a chat or a text to continue, with options and log-probabilities."""

    chat: bool
    options: dict[str, Any]

    def params(self) -> SamplingParams:
        options = {**self.options}
        if "logit_bias" in options:
            options["logit_bias"] = {int(token): value for token, value in options["logit_bias"].items()}
        return SamplingParams(max_tokens=TOKENS, logprobs=2, **options)

    def body(self, speculative: object, stream: bool) -> dict[str, Any]:
        body = {"model": MODEL, "max_tokens": TOKENS, "speculative": speculative, "stream": stream}
        if self.chat:
            return {**body, **self.options, "messages": CHAT, "logprobs": True, "top_logprobs": 2}
        return {**body, **self.options, "prompt": TEXT, "logprobs": 2}


@dataclass(frozen=True)
class Truth:
    """An expected answer."""

    text: str
    logprobs: list[float]  # of the tokens that were chosen
    finish_reason: str | None


CASES = [Case(chat, options) for options in OPTIONS for chat in (False, True)]


@pytest.fixture(scope="module")
def truths(offline: LLM) -> list[Truth]:
    """The offline engine's answers, without drafting."""
    texts = iter(offline.generate([TEXT] * len(OPTIONS), [case.params() for case in CASES if not case.chat]))
    chats = iter(offline.chat([CHAT] * len(OPTIONS), [case.params() for case in CASES if case.chat]))
    outputs = [next(chats if case.chat else texts).outputs[0] for case in CASES]
    return [
        Truth(
            one.text,
            [entry[token].logprob for entry, token in zip(one.logprobs or [], one.token_ids, strict=True)],
            one.finish_reason,
        )
        for one in outputs
    ]


async def ask(server: Server, case: Case, speculative: object, stream: bool) -> Truth:
    """What the server answers."""
    path = "/v1/chat/completions" if case.chat else "/v1/completions"
    answer = await post(server, path, case.body(speculative, stream))
    assert answer.status == 200, answer.body
    choices = _streamed_choices(answer) if stream else [json.loads(answer.body)["choices"][0]]
    logprobs = [value for choice in choices for value in _logprobs(choice)]
    text = "".join(_text(choice) for choice in choices)
    return Truth(text, logprobs, choices[-1]["finish_reason"])


def _streamed_choices(answer: Answer) -> list[dict[str, Any]]:
    assert answer.complete, answer.body
    return [choice for _, choice in answer.choices]


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or message.get("content") or ""


def _logprobs(choice: dict[str, Any]) -> list[float]:
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"] or ()]
    return list(logprobs.get("token_logprobs") or ())


def test_alone(real_server: ServerProcess, truths: Sequence[Truth]) -> None:
    """Every option, of a chat or of a text."""

    async def work() -> None:
        for number, (case, truth) in enumerate(zip(CASES, truths, strict=True)):
            if number % 4 in (1, 2) and not LARGE:
                continue
            speculative, stream = SPECULATIVE[number % len(SPECULATIVE)], number % 8 < 4
            assert await ask(real_server.server, case, speculative, stream) == truth, (case, speculative)

    asyncio.run(work())


def test_the_bytes_are_the_same_among_sixteen_other_requests(
    real_server: ServerProcess, truths: Sequence[Truth]
) -> None:
    room = asyncio.Semaphore(COMPANY)

    async def one(case: Case, truth: Truth, speculative: object, stream: bool) -> None:
        async with room:
            assert await ask(real_server.server, case, speculative, stream) == truth, (case, speculative)

    # every case with two drafters in turn, or all, streamed and not
    async def work() -> None:
        await asyncio.gather(
            *(
                one(
                    case,
                    truth,
                    SPECULATIVE[(number + turn) % len(SPECULATIVE)],
                    stream=(number // 2 + turn) % 2 == 0,
                )
                for turn in range(len(SPECULATIVE) if LARGE else 2)
                for number, (case, truth) in enumerate(zip(CASES, truths, strict=True))
            )
        )

    asyncio.run(work())


def test_the_cases_differ_and_use_drafts(real_server: ServerProcess, truths: Sequence[Truth]) -> None:
    """Otherwise the comparisons above would show little."""
    assert len({(truth.text, tuple(truth.logprobs)) for truth in truths}) == len(truths)

    async def work() -> dict[str, Any]:
        body = {**CASES[1].body("suffix", False), "return_metrics": True}
        answer = await post(real_server.server, "/v1/chat/completions", body)
        figures: dict[str, Any] = json.loads(answer.body)["metrics"]["speculative_decoding"]
        return figures

    assert asyncio.run(work())["num_accepted_draft_tokens"] > 0
