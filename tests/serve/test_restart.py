"""A killed server starts again at once, with its stored state intact, and answers the same bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from benchmarks.server.process import ServerProcess
from paceline.bench.servers.client import Server, post

pytestmark = pytest.mark.real

BODY = {"prompt": "one two three one two three one", "max_tokens": 24, "temperature": 0.8, "seed": 9}


def answer(server: Server) -> str:
    whole = asyncio.run(post(server, "/v1/completions", BODY))
    assert whole.status == 200, whole.body
    text: str = json.loads(whole.body)["choices"][0]["text"]
    return text


def test_the_server_restarts_after_a_kill_during_answers(tmp_path: Path) -> None:
    kept = tmp_path / "past.npz"
    drafts = json.dumps({"method": "suffix", "suffix_cache_path": str(kept)})

    def start() -> ServerProcess:
        return ServerProcess("--threads", "1", "--speculative-config", drafts)

    first = start()
    text = answer(first.server)
    assert answer(first.server) == text  # now from the prefix cache, and drafted from the past answer
    assert first.stop() == 0
    written = kept.read_bytes()

    second = start()
    assert answer(second.server) == text
    endless = {**BODY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{second.url}/v1/completions", json=endless) as stream:
        next(stream.iter_lines())
        second.kill()
    assert kept.read_bytes() == written
    assert list(tmp_path.iterdir()) == [kept]

    with start() as third:
        assert answer(third.server) == text
