"""A killed server starts again at once, with its stored state intact, and answers the same bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server.process import ServerProcess
from paceline import LLM, SamplingParams
from paceline.bench.servers.client import Server, post

pytestmark = pytest.mark.real

BODY: dict[str, Any] = {
    "prompt": "one two three one two three one",
    "max_tokens": 24,
    "temperature": 0.8,
    "seed": 9,
}


def answer(server: Server, **changes: Any) -> str:
    whole = asyncio.run(post(server, "/v1/completions", BODY | changes))
    assert whole.status == 200, whole.body
    text: str = json.loads(whole.body)["choices"][0]["text"]
    return text


def test_the_server_restarts_after_a_kill_during_answers(tmp_path: Path) -> None:
    kept = tmp_path / "past.npz"
    drafts = {"method": "suffix", "suffix_cache_path": str(kept)}
    offline = LLM(threads=1, speculative_config=drafts)
    params = SamplingParams(**{name: value for name, value in BODY.items() if name != "prompt"})
    text = offline.generate(BODY["prompt"], params, use_tqdm=False)[0].outputs[0].text
    offline.close()
    written = kept.read_bytes()

    def start() -> ServerProcess:
        return ServerProcess("--threads", "1", "--speculative-config", json.dumps(drafts))

    first = start()
    assert answer(first.server) == text  # drafted from the past answer
    assert answer(first.server) == text  # and from the prefix cache
    endless = {**BODY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{first.url}/v1/completions", json=endless) as stream:
        next(stream.iter_lines())
        first.kill()
    assert kept.read_bytes() == written
    assert list(tmp_path.iterdir()) == [kept]

    second = start()
    assert answer(second.server) == text
    assert answer(second.server, prompt="four five six four five six four")
    assert second.stop() == 0
    assert kept.read_bytes() != written  # a server that ends by SIGTERM keeps what it answered
