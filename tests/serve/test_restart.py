"""A killed server starts again at once, with its stored state intact, and answers the same bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server.process import ServerProcess
from paceline import LLM, SamplingParams
from paceline.bench.servers.client import Server, post
from tests.draft.model.test_draft_model_cpu import save_model

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 9, "ignore_eos": True}


def answer(server: Server, prompt: list[int] = PROMPT) -> list[int]:
    whole = asyncio.run(post(server, "/v1/completions", body(prompt)))
    assert whole.status == 200, whole.body
    ids: list[int] = json.loads(whole.body)["choices"][0]["token_ids"]
    return ids


def body(prompt: list[int] = PROMPT, **changes: Any) -> dict[str, Any]:
    return {"prompt": prompt, "return_token_ids": True, **OPTIONS, **changes}


def model_of_long_texts(folder: Path) -> str:
    """A tiny llama."""
    folder.mkdir()
    save_model(folder, "llama")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 8192}))
    return str(folder)


def test_the_server_restarts_after_a_kill_during_answers(tmp_path: Path) -> None:
    model, store = model_of_long_texts(tmp_path / "model"), tmp_path / "store"
    store.mkdir()
    kept = store / "past.npz"
    drafts = {"method": "suffix", "suffix_cache_path": str(kept)}
    offline = LLM(model, threads=1, speculative_config=drafts)
    (output,) = offline.generate({"prompt_token_ids": PROMPT}, SamplingParams(**OPTIONS), use_tqdm=False)
    ids = list(output.outputs[0].token_ids)
    offline.close()
    written = kept.read_bytes()

    def start() -> ServerProcess:
        return ServerProcess(model, "--threads", "1", "--speculative-config", json.dumps(drafts))

    first = start()
    assert answer(first.server) == ids  # drafted from the past answer
    assert answer(first.server) == ids  # and from the prefix cache
    endless = body(max_tokens=8000, stream=True)
    with httpx.stream("POST", f"{first.url}/v1/completions", json=endless) as stream:
        next(stream.iter_lines())
        first.kill()
    assert kept.read_bytes() == written
    assert list(store.iterdir()) == [kept]

    second = start()
    assert answer(second.server) == ids
    assert answer(second.server, PROMPT[1:]) != ids
    assert second.stop() == 0
    assert kept.read_bytes() != written  # a server that ends by SIGTERM keeps what it answered
