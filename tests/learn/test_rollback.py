"""A bad head that was promoted is rolled back by its live loss, on a real model with its real controllers.

Hundreds of steps of a real model, so only `make test-large` runs it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from paceline.build import build_engine
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.learn.activity import Activity
from paceline.learn.data.collector import Collector, Policy
from paceline.learn.data.folder import LearnFolder
from paceline.learn.data.store import TrafficStore
from paceline.learn.evaluation.history import History
from paceline.learn.evaluation.trial import TrialConfig
from paceline.learn.jobs import ProcessJobs
from paceline.learn.status import LearnerConfig, LearnStatus
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import load_head, write_head
from paceline.models.heads.config import TargetName
from paceline.models.heads.registry import resolve_head
from paceline.serve.learner import LearningModel
from tests.large import REPEATS

MODEL, SECONDS = "smollm2-135m", 400.0  # for the test to give up
CONFIG = LearnerConfig(
    min_rows=10**9,  # nothing is trained
    poll_seconds=0.02,
    watch_steps=24,
    watch_points=2,
    trial=TrialConfig(turn_steps=24, skipped_steps=4, min_pairs=2, max_pairs=4),
)


@REPEATS
@pytest.mark.parametrize("draft", ["eagle3", "auto"])
def test_a_bad_head_is_rolled_back_by_its_live_loss_and_no_byte_changes(
    draft: str, tmp_path: Path, activity: Activity
) -> None:
    options = {"model": MODEL, "threads": 1, "max_model_len": 1024}
    plain = build_engine(EngineConfig.from_options(speculative_config="off", **options))
    loaded = build_engine(EngineConfig.from_options(speculative_config=draft, **options))
    folder = LearnFolder(tmp_path / "learn")
    store = TrafficStore(folder.traffic, TargetName(loaded.fingerprint, MODEL), 49152)
    first = resolve_head("shipped", "eagle3", loaded.fingerprint)
    history = History(folder.heads, first)
    number = history.add(rubbish(first, tmp_path), {}).number
    jobs = ProcessJobs(folder, MODEL, ())
    load, collector = partial(loaded.load_head, "eagle3"), Collector(store, Policy())
    learning = LearningModel("eagle3", load, collector, history, jobs, activity, CONFIG)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    pairs = product(
        ("rivers", "bread", "the moon", "chess", "old maps", "bees", "trains", "salt"), range(2, 40)
    )
    prompts = [loaded.tokenizer.encode(f"Write {count} sentences about {what}.") for what, count in pairs]

    async def main() -> tuple[LearnStatus, list[list[int]]]:
        front = AsyncEngine(loaded.engine, loaded.tokenizer, max_queue=9, observers=learning.observers)
        front.start()
        status = learning.start(front, MODEL).status
        answers: list[list[int]] = []
        planted, end = False, time.monotonic() + SECONDS
        try:
            while status.rollbacks == 0 and time.monotonic() < end:
                prompt = prompts[len(answers) % len(prompts)]
                stream = await front.submit(prompt, params, f"r{len(answers)}")
                answers.append([token async for update in stream for token in update.token_ids])
                if not planted and len(status.curve) >= 3:
                    history.promote(number)
                    planted = True
            return status, answers
        finally:
            await learning.stop()
            await front.stop()
            learning.collector.close()

    status, answers = asyncio.run(main())
    decisions = [line["decision"] for line in history.decisions()]
    assert (status.rollbacks, decisions[-1]) == (1, "rolled back"), history.decisions()
    assert history.current().number == 0
    for prompt, answer in list(zip(prompts, answers, strict=False))[:4]:
        (request,) = plain.engine.add_request(prompt, params)
        while plain.engine.has_unfinished:
            plain.engine.step()
        assert answer == request.output_token_ids


def rubbish(shipped: Path, folder: Path) -> Path:
    """The shipped head with an output of noise: it is hardly ever right."""
    head, name = load_head(shipped), "lm_head.weight"
    shape = head.tensors[name].float32().shape
    noise = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    write_head(replace(head, tensors={**head.tensors, name: encode(noise)}), folder / "rubbish", "sglang")
    return folder / "rubbish"
