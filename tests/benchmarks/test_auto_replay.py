"""`python -m benchmarks auto-replay`: what a recording says of chains, trees and lookups, and the command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.control.replay import recording
from benchmarks.control.replay.device import SimulatedLookup
from benchmarks.control.replay.recording import (
    DEPTH,
    HEAD,
    FollowedTree,
    FollowingHead,
    RecordedAnswer,
    read_recording,
    record,
)
from benchmarks.control.replay.replay import Answer, Replay, h200_pass
from paceline.backends.async_decoding import DeviceDraft
from paceline.core.trees import DraftPlan
from paceline.errors import ConfigError
from tests.benchmarks.cli import run_json

HEAD_RUNNER = object()


def recorded(length: int, ranks: str, prompt: int = 20) -> RecordedAnswer:
    """An answer that never repeats itself, at each of whose positions the head's guesses have these ranks."""
    tokens = [*range(1000, 1000 + length)]
    return RecordedAnswer(
        [*range(prompt)], tokens, False, [ranks[: length - place] for place in range(length)]
    )


def chain(length: int) -> DeviceDraft:
    return DeviceDraft(length, HEAD_RUNNER)


def test_ranks_say_what_chains_and_trees_bring():
    answer = Answer(recorded(30, "0021"))
    assert [answer.accepted(0, chain(length))[1] for length in (1, 2, 3)] == [[0], [0, 1], [0, 1]]
    tree = DeviceDraft(4, HEAD_RUNNER, branching=3, nodes=12)
    assert Answer(recorded(30, "01")).accepted(0, tree)[1] == [0, 5], "the second child below the first"
    assert Answer(recorded(30, "30")).accepted(0, tree)[1] == [], "only three children"


def test_a_lookup_replaces_the_chain_where_it_finds_something():
    text = [*range(100, 110)]
    answer = Answer(RecordedAnswer([*text, 1, 2], [*text, 3, 4], False, ["00"] * 12))
    draft = DeviceDraft(3, HEAD_RUNNER, look_up=SimulatedLookup().device.look_up, network_length=2)
    assert answer.accepted(0, draft) == (0, [0, 1])
    assert answer.accepted(3, draft) == (3, [0, 1, 2])
    assert answer.accepted(9, draft) == (3, [0])


@pytest.mark.parametrize(("length", "passes"), [(0, 63), (2, 21), (5, 21)])
@pytest.mark.parametrize("longer", [False, True])
def test_a_fixed_setting_takes_the_passes_that_its_drafts_leave(length, passes, longer):
    """The first token comes from the prompt's pass. Another answer may be longer."""
    answers = [Answer(recorded(64, "001")), *[Answer(recorded(90, "0"))] * longer]
    replay = Replay(answers, DraftPlan(HEAD, length) if length else DraftPlan())
    seconds = replay.seconds([0], 0.0)
    decoding = passes * h200_pass(1, chain(length) if length else None)
    assert decoding < seconds < 1.05 * decoding + 1.5e-3


@pytest.mark.parametrize("room", [1, 3, DEPTH, DEPTH + 2])
def test_a_head_follows_an_answer_no_further_than_the_request_has_pages(room, monkeypatch):
    """Beyond them it would overwrite other memory."""
    monkeypatch.setattr(FollowedTree, "_candidates", lambda *given: [(5, 0.0)])
    context = SimpleNamespace(room=room, request=SimpleNamespace(sampling=None))
    tree = FollowedTree(context, DraftPlan(HEAD, DEPTH, 4, DEPTH), SimpleNamespace(least_chance=0.0), True)
    tree.wanted = [5] * DEPTH
    while tree.frontier:
        tree.grow(np.zeros((1, 8), np.float32))
    assert tree.ranks == "0" * min(room, DEPTH)


def test_a_head_that_follows_asks_for_the_room_that_its_plan_has_reserved():
    opened = []

    class Pages:
        def open(self, requests, budgets):
            opened.extend(budgets)
            return [None] * len(requests)

    head = FollowingHead.__new__(FollowingHead)
    head._pages = Pages()
    head.follow({7: [5] * 9})
    head.propose([SimpleNamespace(seed=7, num_output=0)], [DraftPlan(HEAD, 3)])
    assert opened == [3]


def test_a_recording_that_was_interrupted_is_not_replayed(tmp_path: Path, monkeypatch):
    def interrupted(*given: object):
        yield {"workload": "chat", "temperature": 0.0, **asdict(recorded(8, "0"))}
        raise KeyboardInterrupt

    monkeypatch.setattr(recording, "recorded_lines", interrupted)
    file = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        record(file, "no/such/model", ["chat"], 64, None, lambda turn: None)
    assert not file.exists()


def test_a_misspelt_workload_is_reported_before_anything_is_recorded(tmp_path: Path):
    with pytest.raises(ConfigError, match="chta"):
        record(tmp_path / "answers.jsonl", "no/such/model", ["chat", "chta"], 64, None, lambda turn: None)


def test_the_command_replays_a_file_and_counts_the_cells_that_miss(tmp_path: Path):
    file = tmp_path / "answers.jsonl"
    lines = [
        {"workload": "easy", "temperature": 0.0, **asdict(recorded(64, ranks))}
        for ranks in ("00", "0001", "000", "01")
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert len(read_recording(file)["easy", 0.0]) == 4
    cells = run_json(tmp_path, "auto-replay", str(file), "--orders", "1")["cells"]
    assert len(cells) == 4
    for cell in cells:
        assert len(cell["seconds"]) == 3
        assert min(cell["seconds"]) < 0.9 * cell["fixed"]["off"]
