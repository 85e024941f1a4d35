"""What a head gains in the engine."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

from paceline.engine.engine import Engine
from paceline.llm import LLM
from paceline.train.job import engine_loader
from paceline.train.report.evaluation import HeldOutPrompt, tokens_per_pass
from tests.models.model_files import config_of, random_tensors, write_gguf

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def test_an_engine_is_gone_before_the_next_one_is_made(tmp_path: Path) -> None:
    """On a GPU each takes most of the memory for its KV cache."""
    model = write_gguf(tmp_path / "tiny.gguf", "llama", random_tensors(config_of("llama")))
    load, loaded = engine_loader(model, "cpu"), list[weakref.ref[Engine]]()

    def watched(config: dict[str, Any]) -> LLM:
        gc.collect()
        assert [each() for each in loaded] == [None] * len(loaded)
        llm = load(config)
        loaded.append(weakref.ref(llm.engine))
        return llm

    prompts = [HeldOutPrompt("one", [5, 6, 7, 5, 6]), HeldOutPrompt("two", [9, 8, 9, 8])]
    table, number = tokens_per_pass(watched, prompts, {"first": NGRAM, "again": NGRAM}, max_tokens=8)
    assert (len(loaded), number) == (2, 2)
    assert table["first"] == table["again"]
    assert set(table["first"]) == {"one", "two", "all"}
    assert min(table["first"].values()) >= 1
