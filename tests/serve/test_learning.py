"""`paceline serve --learn`: what is kept of requests to every endpoint, and what is refused at the start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.engine.outputs import RequestOutput
from paceline.errors import ConfigError
from paceline.learn.data.collector import Collector, Origin, Policy
from paceline.learn.data.folder import LearnFolder
from paceline.learn.data.store import StoreLimits, TrafficStore
from paceline.learn.evaluation.history import History
from paceline.learn.head_commands import rollback
from paceline.learn.options import LearnOptions
from paceline.models.heads.config import TargetName
from paceline.serve.http.middleware import key_digest
from paceline.serve.learning import TrainableModel, collector_policy, learn_options, learning_model
from paceline.serve.options import ServeOptions
from tests.serve.api import Api
from tests.toy import toy_engine
from tests.toy_drafter import ScriptedDrafter

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, "temperature": 0}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "toy", "prompt": ["abc", "bcd"], "max_tokens": 4, "temperature": 0},
    "/v1/responses": {"model": "toy", "input": "abc", "max_output_tokens": 4, "temperature": 0},
    "/v1/messages": CHAT,
}


class Learning:
    """An API whose finished requests go to a store."""

    def __init__(self, folder: Path) -> None:
        self.store = TrafficStore(folder, TargetName("f00d", "toy"), 1000, StoreLimits())
        self.collector = Collector(self.store, Policy())
        self.api = Api(on_finished=self.collector.offer)

    def close(self) -> None:
        self.api.close()
        self.collector.close()


@pytest.fixture
def learning(tmp_path: Path) -> Iterator[Learning]:
    made = Learning(tmp_path)
    yield made
    made.close()


def test_requests_of_every_endpoint_are_kept_unless_their_body_forbids_it(learning: Learning) -> None:
    for path, body in REQUESTS.items():
        learning.api.post(path, body)
        learning.api.post(path, {**body, "store": False})
        learning.api.post(path, {**body, "cache_salt": "mine"})
    learning.api.chunks("/v1/chat/completions", {**CHAT, "segment": "sql"})
    learning.collector.close()
    rows = list(learning.store.rows())
    assert len(rows) == len(REQUESTS) + 1 + 1  # two prompts of completions, and the stream
    assert rows[-1].segment == "sql"
    assert learning.collector.counts.refused == 2 * (len(REQUESTS) + 1)
    answer = learning.api.post("/v1/completions", {**REQUESTS["/v1/completions"], "return_token_ids": True})
    pairs = {(row.prompt_ids, row.output_ids) for row in rows}
    for choice in answer["choices"]:  # two prompts of one request, kept in the order in which they finished
        assert (tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])) in pairs


def test_a_key_that_is_to_be_skipped_is_the_key_that_clients_send(tmp_path: Path) -> None:
    """--learn-skip-key names the key itself; what is compared, and what is kept, are hashes of it."""
    flags, server = LearnOptions(learn_skip_key=("two",)), ServeOptions(api_key=("one", "two"))
    policy = collector_policy(replace(flags, learn_salts="shared"), server)
    store = TrafficStore(tmp_path, TargetName("f00d", "toy"), 1000, StoreLimits())
    collector = Collector(store, policy)
    api = Api(on_finished=collector.offer, options=server)
    for key in ("one", "two", "one"):
        sent = api.request(
            "POST", "/v1/chat/completions", json=CHAT, headers={"Authorization": f"Bearer {key}"}
        )
        assert sent.status_code == 200
    collector.close()
    api.close()
    rows = list(store.rows())
    assert (len(rows), collector.counts.refused) == (2, 1)
    assert rows[0].key == rows[1].key != ""
    assert "one" not in rows[0].key


class FakeHead(ScriptedDrafter):
    """Drafts as the method of a head that learns."""

    name = "eagle3"


def trainable(tmp_path: Path) -> TrainableModel[Path]:
    config, target = EngineConfig.from_options(model="smollm2-135m"), TargetName("f00d", "toy")
    return TrainableModel(target, 1000, "eagle3", tmp_path / "first", Path, str, config)


def test_a_head_of_one_salt_drafts_for_requests_of_this_salt_alone(tmp_path: Path) -> None:
    drafted: dict[tuple[str, str], int] = {}  # by salt, and by what the request asks for

    def finished(output: RequestOutput, origin: Origin) -> None:
        model.collector.offer(output, origin)
        drafted[origin.cache_salt, str(origin.params.speculative)] = (
            output.metrics.speculative.num_draft_tokens
        )

    options = LearnOptions(learn=True, learn_dir=str(tmp_path), learn_salt="mine")
    anything: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [1] * 99)  # drafted for every prompt
    engine = toy_engine(drafter=FakeHead(anything, "right"), budget=2, max_model_len=400)
    with learning_model(options, ServeOptions(), trainable(tmp_path)) as model:
        api = Api(engine, on_finished=finished, restrict=model.restrict)
        asked: list[Any] = [None, "auto", "eagle3", {"method": "eagle3"}]
        for speculative in (*asked, "off"):
            for salt in ("mine", "yours", None):
                body = {**CHAT, "cache_salt": salt, "speculative": speculative}
                api.post("/v1/chat/completions", body)
        api.close()
        lookups = SamplingParams(speculative="suffix")
        assert model.restrict(lookups, Origin(lookups, cache_salt="yours")) is lookups  # they learn apart
    for speculative in asked:
        assert drafted["mine", str(speculative)] > 0
        assert drafted["yours", str(speculative)] == drafted["", str(speculative)] == 0
    assert drafted["mine", "off"] == 0
    store = TrafficStore(LearnFolder(tmp_path).traffic)
    assert {row.salt for row in store.rows()} == {store.hash("mine")}


def test_what_was_kept_without_a_salt_is_remembered_by_drafters_after_a_restart(tmp_path: Path) -> None:
    options = LearnOptions(learn=True, learn_dir=str(tmp_path), learn_salts="own")
    bodies = [{}, {"cache_salt": "mine"}, {"store": False}]
    with learning_model(options, ServeOptions(), trainable(tmp_path)) as model:
        api = Api(on_finished=model.collector.offer)
        for number, body in enumerate(bodies):
            message = {"role": "user", "content": "abc"[number:]}
            api.post("/v1/chat/completions", {**CHAT, "messages": [message], **body})
        api.close()
    rows = list(TrafficStore(LearnFolder(tmp_path).traffic).rows())
    remembered: list[tuple[Sequence[int], Sequence[int]]] = []
    again = replace(trainable(tmp_path), remember=lambda *answer: remembered.append(answer))
    with learning_model(options, ServeOptions(), again):
        assert remembered == [(row.prompt_ids, row.output_ids) for row in rows if not row.salt]
    assert (len(rows), len(remembered)) == (3, 2)  # one with a salt; the last is a request of api.close


def test_heads_of_a_salt_are_found_by_no_server_that_does_not_name_it(tmp_path: Path) -> None:
    def served(salt: str | None) -> tuple[Path, int]:
        options = LearnOptions(learn=True, learn_dir=str(tmp_path), learn_salt=salt)
        with learning_model(options, ServeOptions(), trainable(tmp_path)) as model:
            return model.history.folder, model.history.current().number

    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").write_text("weights")
    folder, _ = served("mine")
    history = History(folder, tmp_path / "first")
    history.promote(history.add(head, {}).number)
    assert [served(salt)[1] for salt in ("mine", "yours", None)] == [1, 0, 0]
    store = TrafficStore(LearnFolder(tmp_path).traffic)
    rollback(tmp_path, store.hash("mine"))
    assert served("mine")[1] == 0


def test_of_several_api_keys_one_can_have_a_head_of_its_own(tmp_path: Path) -> None:
    config = EngineConfig.from_options(model="smollm2-135m")
    flags = {"learn": True, "learn_salt": "one"}
    learning = learn_options(flags, ServeOptions(api_key=("one", "two")), config)
    policy = collector_policy(learning, ServeOptions(api_key=("one", "two")))
    key = {name: key_digest(name.encode()).hex() for name in ("one", "two")}
    assert policy.may_use_head(Origin(SamplingParams(), key=key["one"]))
    assert not policy.may_use_head(Origin(SamplingParams(), key=key["two"]))
    assert not policy.may_use_head(Origin(SamplingParams(), key=key["two"], cache_salt="one"))
    with pytest.raises(ConfigError, match="give one of them as --learn-salt"):
        learn_options(flags, ServeOptions(api_key=("two", "three")), config)
    with pytest.raises(ConfigError, match="and no --learn-salts"):
        LearnOptions(learn_salt="one", learn_salts="shared")


def test_what_cannot_be_learned_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    def refused(match: str, engine: dict[str, Any] | None = None, **server: Any) -> None:
        options = ServeOptions(**server)
        config = EngineConfig.from_options(model="smollm2-135m", **(engine or {}))
        with pytest.raises(ConfigError, match=match):
            learn_options({"learn": True, "learn_dir": str(tmp_path)}, options, config)

    refused("here is none: give --draft eagle3:PATH", {"speculative_config": "off"})
    refused("here is none", {"speculative_config": "ngram"})
    refused("--learn-salts shared", api_key=("one", "two"))
    with pytest.raises(ConfigError, match=r"none\.jsonl is no file: make one by `paceline train answers`"):
        LearnOptions(learn_generic=(str(tmp_path / "none.jsonl"),))


def test_one_api_key_separates_nothing_and_off_is_the_default(tmp_path: Path) -> None:
    options = ServeOptions(api_key=("one",))
    config = EngineConfig.from_options(model="smollm2-135m")
    assert learn_options({"learn": True}, options, config).learn
    assert not learn_options({}, options, config).learn
