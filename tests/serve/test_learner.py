"""A server that learns follows its folder while requests run, shows what it does, and says what cannot."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from starlette.testclient import TestClient

from paceline.build import Loaded, build_engine
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.errors import ConfigError, UnavailableError
from paceline.learn.data.collector import Collector, Policy
from paceline.learn.data.folder import LearnFolder
from paceline.learn.data.store import TrafficStore
from paceline.learn.evaluation.history import History
from paceline.learn.jobs import ProcessJobs
from paceline.learn.status import LearnerConfig, LearnStatus
from paceline.models.heads.config import TargetName
from paceline.serve.learner import LearningModel, first_head
from paceline.serve.observability import live
from paceline.serve.observability.learning_page import Learning, LearnPage, router
from tests.models.heads.model_with_heads import save_model_with_heads

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_heads(tmp_path_factory.mktemp("model"))


def load(folder: Path, draft: object) -> Loaded:
    options = {"backend": "torch", "threads": 1, "max_model_len": 200}
    return build_engine(EngineConfig.from_options(model=str(folder), speculative_config=draft, **options))


def eagle3(folder: Path) -> Loaded:
    return load(folder, {"method": "eagle3", "model": str(folder / "head3"), "any_target": True})


def test_a_head_promoted_by_hand_serves_while_requests_run_and_no_byte_changes(folder, tmp_path, activity):
    alone = load(folder, "off").engine
    (request,) = alone.add_request(list(range(3, 40)), PARAMS)
    while alone.has_unfinished:
        alone.step()
    loaded = eagle3(folder)
    store = TrafficStore(tmp_path / "traffic", TargetName("f00d", "tiny"), 173)
    learning = LearningModel(
        "eagle3",
        partial(loaded.load_head, "eagle3"),
        Collector(store, Policy()),
        History(tmp_path / "heads", folder / "head3"),
        ProcessJobs(LearnFolder(tmp_path), str(folder), ()),
        activity,
        LearnerConfig(poll_seconds=0.001),
    )
    number = learning.history.add(folder / "head4", {}).number

    async def main() -> tuple[list[int], LearnStatus]:
        front = AsyncEngine(loaded.engine, loaded.tokenizer, max_queue=9, observers=learning.observers)
        front.start()
        shown = learning.start(front, "tiny")
        try:
            stream = await front.submit(list(range(3, 40)), PARAMS, "r")
            learning.history.promote(number)
            while shown.status.head != number:
                await asyncio.sleep(0.001)
            tokens = [token async for update in stream for token in update.token_ids]
            with pytest.raises(ConfigError, match="no drafter medusa is loaded"):
                await front.replace_head("medusa", loaded.load_head("eagle3", folder / "head4"))
            return tokens, shown.status
        finally:
            await learning.stop()
            learning.collector.close()
            await front.stop()
            with pytest.raises(UnavailableError):
                await front.replace_head("eagle3", loaded.load_head("eagle3", folder / "head4"))

    tokens, status = asyncio.run(main())
    assert tokens == request.output_token_ids
    assert status.head == number
    assert [line["decision"] for line in learning.history.decisions()] == ["serves"]


def test_the_history_begins_with_the_head_that_the_model_was_loaded_with(folder):
    loaded = eagle3(folder)
    assert first_head(loaded.speculation, "eagle3", loaded.fingerprint) == folder / "head3"


@pytest.fixture
def shown(tmp_path: Path) -> Learning:
    history = History(tmp_path, tmp_path, clock=lambda: 7.0)
    history.note("promoted", head=2, reason="it gains", evidence={"rows": "many"})
    status = LearnStatus(head=2, swaps=2, training_steps=90, gain=1.25, present_tokens_per_pass=2.0)
    status.accepted = {"eagle3": 30, "suffix": 10}
    status.curve = deque([(5.0, 0, {"sql": 2.0}), (6.0, 2, {"sql": 2.5, "chat": 1.5})])
    return Learning("tiny", status, history, lambda: 321)


def test_metrics_tell_rows_swaps_and_acceptance(shown):
    registry = CollectorRegistry()
    registry.register(LearnPage(shown))
    text = generate_latest(registry).decode()
    for line in (
        'paceline:learn_rows_total{model_name="tiny"} 321.0',
        'paceline:learn_training_steps_total{model_name="tiny"} 90.0',
        'paceline:learn_swaps_total{model_name="tiny"} 2.0',
        'paceline:learn_head{model_name="tiny"} 2.0',
        'paceline:learn_gain{model_name="tiny"} 1.25',
        'paceline:learn_replayed_tokens_per_pass{head="present",model_name="tiny"} 2.0',
        'paceline:learn_live_tokens_per_draft{model_name="tiny",segment="sql"} 2.5',
    ):
        assert line in text
    assert 'head="candidate"' not in text  # not known yet
    untold = replace(shown, status=LearnStatus())
    assert list(LearnPage(untold).collect())


def test_the_page_reads_the_curve_and_the_decisions(shown):
    app = FastAPI()
    app.include_router(router(shown))
    state = TestClient(app).get("/learn").json()
    assert state["accepted"] == {"eagle3": 30, "suffix": 10}  # what past responses gain is apart
    assert [point["head"] for point in state["curve"]] == [0, 2]
    assert state["curve"][1]["tokens_per_draft"] == {"sql": 2.5, "chat": 1.5}
    assert state["decisions"] == [{"time": 7.0, "decision": "promoted", "head": 2, "reason": "it gains"}]


# As much of a browser's document as the panel uses; each element becomes [tag, attributes, children].
DOCUMENT = """
class Node {
  constructor(tag) { this.tag = tag; this.attributes = {}; this.children = []; this.clientWidth = 600; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.children = more; }
  toJSON() { return [this.tag, this.attributes, this.children]; }
}
const found = { "learning-card": new Node("section"), learning: new Node("div") };
globalThis.document = {
  createElement: tag => new Node(tag), createElementNS: (_, tag) => new Node(tag),
  getElementById: id => found[id],
};
const { showLearning } = await import("./learning.js");
showLearning(JSON.parse(process.argv[2]));
console.log(JSON.stringify([found["learning-card"].hidden, found.learning]));
"""


def walk(node: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    """Every element: its tag, its attributes, its own text."""
    tag, attributes, children = node
    yield tag, attributes, "".join(child for child in children if isinstance(child, str))
    for child in children:
        if not isinstance(child, str):
            yield from walk(child)


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the panel's script with node")
def test_the_panel_draws_the_series_of_the_metrics_and_marks_swaps_without_overlaps(shown, tmp_path):
    points = [(float(5 + at), at // 3, {"sql": 2 + at / 10, "chat": 1.5}) for at in range(40)]
    shown.status.curve = deque(points)  # 13 heads in 40 seconds: more labels than there is room for
    app = FastAPI()
    app.include_router(router(shown))
    state = TestClient(app).get("/learn").text
    for script in Path(live.__file__).parents[1].glob("static/*.js"):
        shutil.copy(script, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "page.js").write_text(DOCUMENT)
    drawn = subprocess.run(
        ["node", str(tmp_path / "page.js"), state], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    hidden, panel = json.loads(drawn.stdout)
    assert hidden is False
    elements = list(walk(panel))
    lines = [attributes["d"] for tag, attributes, _ in elements if tag == "path"]
    assert [line.count("L") for line in lines] == [39, 39]  # one for each segment, through all points
    registry = CollectorRegistry()
    registry.register(LearnPage(shown))
    for segment in ("chat", "sql"):
        labels = {"model_name": "tiny", "segment": segment}
        value = registry.get_sample_value("paceline:learn_live_tokens_per_draft", labels)
        assert f"{value:.2f}" in [text for tag, _, text in elements if tag == "b"]
    swaps = [tag for tag, attributes, _ in elements if attributes.get("class") == "cursor"]
    assert len(swaps) == 13
    texts = [
        (float(at["x"]), text) for tag, at, text in elements if tag == "text" and text.startswith("head")
    ]
    assert 5 < len(texts) < 13
    ends = [(x - 3 * len(text), x + 3 * len(text)) for x, text in texts]  # at most 6 pixels a letter
    assert all(end < start for (_, end), (start, _) in pairwise(ends))
    assert all("NaN" not in str(attributes) for _, attributes, _ in elements)
