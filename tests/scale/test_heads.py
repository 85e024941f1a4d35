"""Learned heads on replicas: pushed to all, to those that come later too, and no byte changes."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.build import Loaded, build_engine
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.stats import StepStats
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.errors import BackendError
from paceline.learn.activity import Activity
from paceline.learn.data.collector import Collector, Policy
from paceline.learn.data.folder import LearnFolder
from paceline.learn.data.store import TrafficStore
from paceline.learn.evaluation.history import History
from paceline.learn.evaluation.trial import Meter
from paceline.learn.jobs import ProcessJobs
from paceline.learn.status import LearnerConfig
from paceline.models.heads.config import TargetName
from paceline.models.heads.fingerprint import head_fingerprint
from paceline.scale.heads import FIRST, FOLDERS, HeadReceiver, StepReports, remove_orphans
from paceline.scale.remote.channel import Message
from paceline.scale.remote.remote_engine import RemoteEngine
from paceline.serve.learner import LearningModel
from tests.models.heads.model_with_heads import save_model_with_heads
from tests.scale.fake import Fleet, no_heads

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=50, ignore_eos=True)
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_heads(tmp_path_factory.mktemp("model"))


class Model:
    """A tiny model with a head, and what its replicas load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: list[Loaded] = []

    def load(self, draft: object) -> Loaded:
        options = {"backend": "torch", "threads": 1, "max_model_len": 200}
        config = EngineConfig.from_options(model=str(self.folder), speculative_config=draft, **options)
        return build_engine(config)

    def make_engine(self) -> Engine:
        draft = {"method": "eagle3", "model": str(self.folder / "head3"), "any_target": True}
        self.loaded.append(self.load(draft))
        return self.loaded[-1].engine

    def load_head(self, method: str, folder: Path | None) -> Drafter:
        return self.loaded[0].load_head(method, folder or self.folder / "head3")

    def fleet(self) -> Fleet:
        tokenizer = self.load("off").tokenizer
        return Fleet(self.make_engine, tokenizer, 2, self.load_head, replicas=3)

    def answer(self) -> list[int]:
        """What the model answers without drafts."""
        alone = self.load("off").engine
        (request,) = alone.add_request(PROMPT, PARAMS)
        while alone.has_unfinished:
            alone.step()
        return request.output_token_ids


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model(folder)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def heads(fleet: Fleet) -> dict[str, str]:
    """The heads that the replicas say they have."""
    return {name: link.state["head"] for name, link in fleet.engine.links.items() if link.state}


def test_a_head_is_pushed_to_all_replicas_while_requests_run_and_to_those_that_come_later(
    model: Model, tmp_path: Path
) -> None:
    first, other = model.folder / "head3", model.folder / "head4"
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in ("config.json", "model.safetensors"):
        (broken / file).write_bytes((other / file).read_bytes()[:-100])
    meter, expected = Meter("eagle3"), model.answer()

    async def main() -> None:
        async with model.fleet() as fleet:
            engine = fleet.engine
            engine.push_heads(first, (meter,))
            streams = [await engine.submit(PROMPT, PARAMS, str(number)) for number in range(4)]
            await engine.replace_head("eagle3", other)
            new = head_fingerprint(other)
            assert heads(fleet) == {"r0": new, "r1": new}
            outputs = await asyncio.gather(*[stream.finished() for stream in streams])
            assert [each.outputs[0].token_ids for each in outputs] == [expected] * 4
            await until(lambda: meter.take().steps > 0)  # what replicas do is seen here
            await fleet.replicas.all[0].kill()
            fleet.replicas.add()  # Ray starts another one
            await until(lambda: heads(fleet) == {"r1": new, "r2": new})
            with pytest.raises(BackendError, match="cannot use the head"):
                await engine.replace_head("eagle3", broken)
            await engine.replace_head("eagle3", first)  # back, without its files
            assert heads(fleet) == {"r1": FIRST, "r2": FIRST}

    asyncio.run(main())


class Steps:
    """An Observer that keeps whether a trainer was seen beside each step."""

    def __init__(self) -> None:
        self.disturbed: list[bool] = []

    def step(self, stats: StepStats, deltas: object) -> None:
        self.disturbed.append(stats.disturbed)

    def aborted(self, requests: object) -> None:
        return


def test_replicas_know_which_of_their_passes_the_trainer_has_disturbed(
    model: Model, activity: Activity
) -> None:
    steps = Steps()

    async def main() -> None:
        async with model.fleet() as fleet:
            engine = fleet.engine
            engine.push_heads(model.folder / "head3", (steps,))
            engine.watch_trainer(activity)
            await engine.replace_head("eagle3", model.folder / "head3")  # all messages before have arrived
            for works in (True, False):
                await observe(engine, works)

    async def observe(engine: RemoteEngine, works: bool) -> None:
        steps.disturbed.clear()
        activity.begin_work() if works else activity.end_work()
        short = replace(PARAMS, max_tokens=12)
        streams = [await engine.submit(PROMPT, short, f"{works} {number}") for number in range(4)]
        await asyncio.gather(*[stream.finished() for stream in streams])
        await until(lambda: steps.disturbed[-1:] == [works])  # the first ones began before
        assert works == all(steps.disturbed)

    asyncio.run(main())


def test_the_files_of_a_killed_replica_are_deleted_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    for owner in (ended.pid, os.getpid()):
        (tmp_path / f"{FOLDERS}{owner}-x" / "a5").mkdir(parents=True)
    remove_orphans()
    assert [path.name for path in tmp_path.iterdir()] == [f"{FOLDERS}{os.getpid()}-x"]


def test_what_is_promoted_and_rolled_back_by_hand_serves_on_every_replica(
    model: Model, tmp_path: Path, activity: Activity
) -> None:
    store = TrafficStore(tmp_path / "traffic", TargetName("f00d", "tiny"), 173)
    history = History(tmp_path / "heads", model.folder / "head3")
    number = history.add(model.folder / "head4", {}).number
    learning = LearningModel(
        "eagle3",
        lambda path: path,
        Collector(store, Policy()),
        history,
        ProcessJobs(LearnFolder(tmp_path), str(model.folder), ()),
        activity,
        LearnerConfig(poll_seconds=0.01),
    )

    async def main() -> None:
        async with model.fleet() as fleet:
            fleet.engine.push_heads(model.folder / "head3", learning.observers)
            status = learning.start(fleet.engine, "tiny").status
            history.promote(number)
            await until(lambda: status.head == number)
            assert set(heads(fleet).values()) == {head_fingerprint(model.folder / "head4")}
            history.rollback()
            await until(lambda: status.head == 0)
            assert set(heads(fleet).values()) == {FIRST}
            await learning.stop()

    asyncio.run(main())
    learning.collector.close()


def test_a_replica_without_room_for_a_head_refuses_it_and_its_requests_continue(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, parts = model.answer(), []

    def write(self: HeadReceiver, **part: object) -> None:
        parts.append(part)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HeadReceiver, "_write", write)

    async def main() -> None:
        async with model.fleet() as fleet, asyncio.timeout(20):
            engine = fleet.engine
            engine.push_heads(model.folder / "head3", ())
            links = dict(engine.links)
            stream = await engine.submit(PROMPT, PARAMS, "0")
            with pytest.raises(BackendError, match="No space left"):
                await engine.replace_head("eagle3", model.folder / "head4")
            assert (await stream.finished()).outputs[0].token_ids == expected
            assert engine.num_resumed == 0
            assert dict(engine.links) == links  # no connection was closed
            assert len(parts) <= 2 * 2  # two files of each replica, once

    asyncio.run(main())


def test_a_head_that_lacks_a_part_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[Message] = []

    class Told:
        send = said.append

    async def main() -> None:
        receiver = HeadReceiver(Any, no_heads, StepReports())  # type: ignore[arg-type]
        part = {"id": "a5", "file": "model.safetensors", "data": "AAAA", "last": True}
        receiver.received(Told, "part", {**part, "start": 3})  # type: ignore[arg-type]
        assert said == [["serves", "a5", "a part of model.safetensors before byte 3 was not stored"]]
        assert not list(tmp_path.glob("*/*"))
        receiver.received(Told, "part", {**part, "start": 0})  # type: ignore[arg-type]
        assert [path.name for path in tmp_path.glob("*/*")] == ["a5"]

    asyncio.run(main())
