"""The whole loop, with real processes: a server of a tiny model learns its own traffic while it serves.

Its first trainer is killed. Two processes of torch take seconds to start, so only `make test-large` runs it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from paceline.build import Loaded, build_engine
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.learn.activity import Activity
from paceline.learn.data.collector import Collector, Origin, Policy
from paceline.learn.data.folder import LearnFolder
from paceline.learn.data.store import TrafficStore
from paceline.learn.evaluation.gate import GateConfig
from paceline.learn.evaluation.history import History
from paceline.learn.evaluation.trial import TrialConfig
from paceline.learn.jobs import ProcessJobs
from paceline.learn.status import LearnerConfig, LearnStatus
from paceline.models.heads.checkpoint import write_head
from paceline.models.heads.config import TargetName
from paceline.serve.learner import LearningModel, first_head
from tests.draft.model.test_draft_model_cpu import save_model
from tests.large import REPEATS
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import EAGLE3, VOCAB

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SECONDS = 400.0  # for the test to give up
TRAINING = ("--steps", "80", "--batch-tokens", "1024", "--learning-rate", "0.003", "--device", "cpu")
CONFIG = LearnerConfig(
    min_rows=150,
    max_running=100,
    poll_seconds=0.05,
    gate=GateConfig(min_prompts=8),
    # a gain of 4 %, on a machine that may have other work: significant only after many steps
    trial=TrialConfig(turn_steps=48, share=0.5, skipped_steps=2, min_pairs=4, max_pairs=24),
)


def prompt(number: int) -> list[int]:
    return [3 + number % 160, 7, 3 + number // 160, 11, 5]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    (tmp_path / "model").mkdir()
    model = str(save_model(tmp_path / "model"))
    options = {"backend": "torch", "threads": 1, "max_model_len": 200}
    plain = build_engine(EngineConfig.from_options(model=model, speculative_config="off", **options))
    name = TargetName(plain.fingerprint, "tiny")
    write_head(random_checkpoint(replace(EAGLE3, target=name)), tmp_path / "head", "sglang")
    draft = {"method": "eagle3", "model": str(tmp_path / "head"), "min_prob": 0.0}
    return build_engine(EngineConfig.from_options(model=model, speculative_config=draft, **options))


def children() -> list[int]:
    """The processes that this one has started, of all its threads."""
    files = Path("/proc/self/task").glob("*/children")
    return [int(number) for file in files for number in file.read_text().split()]


@REPEATS
def test_a_server_learns_its_traffic_though_its_first_trainer_is_killed(
    loaded: Loaded, tmp_path: Path, activity: Activity
) -> None:
    folder = LearnFolder(tmp_path / "learn")
    store = TrafficStore(folder.traffic, TargetName(loaded.fingerprint, "tiny"), VOCAB)
    learning = LearningModel(
        "eagle3",
        partial(loaded.load_head, "eagle3"),
        Collector(store, Policy()),
        History(folder.heads, first_head(loaded.speculation, "eagle3", loaded.fingerprint)),
        ProcessJobs(folder, str(tmp_path / "model"), TRAINING, ("--nice", "0")),
        activity,
        CONFIG,
    )

    async def ask(front: AsyncEngine, number: int) -> list[int]:
        stream = await front.submit(prompt(number), GREEDY, f"r{number}")
        tokens = [token async for update in stream for token in update.token_ids]
        assert stream.output is not None
        learning.collector.offer(stream.output, Origin(GREEDY, segment="loops"))
        return tokens

    async def main() -> LearnStatus:
        front = AsyncEngine(loaded.engine, loaded.tokenizer, max_queue=99, observers=learning.observers)
        front.start()
        status = learning.start(front, "tiny").status
        number, killed, end = 0, False, time.monotonic() + SECONDS
        try:
            while status.swaps == 0 and time.monotonic() < end:
                if killed and status.phase in ("training", "scoring"):
                    await asyncio.sleep(0.1)  # leave them the core
                    continue
                await asyncio.gather(*(ask(front, number + each) for each in range(8)))
                number += 8
                if not killed and status.phase == "training" and children():
                    os.kill(children()[0], signal.SIGKILL)
                    killed = True
            return status
        finally:
            await learning.stop()
            await front.stop()
            learning.collector.close()

    status = asyncio.run(main())
    decisions = learning.history.decisions()
    assert status.failures == 1, decisions
    assert status.swaps == 1, decisions
    assert learning.history.current().number == 1
    card = learning.history.card(1)
    assert card["evidence"]["gains"][0]["low"] > 1
    assert not children()
