"""Same bytes with speculation on models with blocks that llama does not have, out of GGUF files."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.build import load_model
from paceline.config import EngineConfig
from tests.lossless.subject import Case, Truth, make_engine, run
from tests.models.gguf_converter import with_gguf
from tests.models.model_files import MODELS, config_of, random_tensors, write_gguf
from tests.tiny import save_checkpoint

SAMPLINGS = ("T 0", "T 0.7, penalties", "T 1, n 2")
PLANS: dict[str, Any] = {
    "ngram": "ngram",
    "suffix": "suffix",
    "suffix tree": {"method": "suffix", "num_speculative_tokens": 12, "branching": 3},
    "draft_model tree": {"method": "draft_model", "num_speculative_tokens": 6, "branching": 2, "depth": 3},
    "layerskip": {"method": "layerskip", "num_speculative_tokens": 3},
}
CONFIGS = ({"method": "ngram"}, {"method": "suffix"}, {"method": "layerskip", "exit_layer": 1})


def write_file(family: str, folder: Path) -> Path:
    if family in MODELS:
        return write_gguf(folder / "m.gguf", family, random_tensors(config_of(family)), kind="Q8_0")
    return with_gguf(save_checkpoint(family, folder)) / "model.gguf"


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek-v3"])
def test_every_plan_gives_the_bytes_of_plain_decoding(family: str, tmp_path: Path) -> None:
    path = str(write_file(family, tmp_path))
    model = load_model(EngineConfig.from_options(model=path, backend="cpu", threads=1))
    random = np.random.default_rng(4)
    prompts = [tuple(np.tile(random.integers(2, 80, 9), 3).tolist()) for _ in range(6)]
    cases = [
        Case(f"prompt {number}", prompt, sampling, 24)
        for number, (prompt, sampling) in enumerate(zip(prompts, cycle(SAMPLINGS), strict=False))
    ]
    truth = Truth(make_engine(path, model, enable_prefix_caching=False))
    draft = {"method": "draft_model", "model": path, "quantization": "int8"}
    engine = make_engine(path, model, [*CONFIGS, draft])
    for plan in PLANS.values():
        outcomes = run(engine, cases, [plan] * len(cases))
        assert truth.differences(cases, outcomes) == []
        assert sum(outcome.count("num_draft_tokens") for outcome in outcomes) > 0
    assert sum(outcome.count("num_accepted_draft_tokens") for outcome in outcomes) > 0
