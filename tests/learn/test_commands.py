"""`paceline learn`: what is kept can be seen, carried elsewhere and deleted."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.errors import ConfigError
from paceline.learn.commands import app
from paceline.learn.data.folder import NOTHING_BETTER, LearnFolder
from paceline.learn.data.rows import TrafficRow
from paceline.learn.evaluation.history import History
from paceline.learn.training.early_stop import EarlyStop
from paceline.learn.training.fine_tune import read_candidate
from paceline.models.checkpoint import Checkpoint
from paceline.train.data.examples import read_examples


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result


@pytest.fixture
def folder(traffic: Path, tmp_path: Path) -> Path:
    """A folder of --learn-dir."""
    shutil.copytree(traffic, LearnFolder(tmp_path / "learned").traffic)
    return tmp_path / "learned"


def test_status_and_show_tell_what_is_kept(folder: Path, rows: list[TrafficRow]) -> None:
    assert f"rows       {len(rows)}," in run("status", "--dir", str(folder)).stdout
    facts = json.loads(run("status", "--dir", str(folder), "--json").stdout)
    assert facts["traffic"]["rows"] == len(rows)
    assert (facts["candidate"], facts["head"], facts["decisions"]) == (None, 0, [])
    History(LearnFolder(folder).heads, folder).note_live(accepted={"eagle3": 30, "suffix": 10})
    told = run("status", "--dir", str(folder)).stdout
    assert "drafters   eagle3 75%, suffix 25% of the accepted tokens" in told
    shown = [
        json.loads(line) for line in run("show", "--dir", str(folder), "--last", "2").stdout.splitlines()
    ]
    assert [tuple(row["prompt_ids"]) for row in shown] == [row.prompt_ids for row in rows[-2:]]
    assert {"side", "sampling", "segment", "time"} <= shown[0].keys()


def test_exported_rows_are_answers_that_every_training_reads(
    folder: Path, rows: list[TrafficRow], tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    run("export", "--dir", str(folder), "--out", str(out))
    examples = read_examples([out], 1024)
    assert len(examples) == sum(len(row.output_ids) >= 2 for row in rows)
    with pytest.raises(ConfigError, match="there already"):
        run("export", "--dir", str(folder), "--out", str(out))


def test_cleared_rows_are_gone(folder: Path) -> None:
    run("clear", "--dir", str(folder))
    assert json.loads(run("status", "--dir", str(folder), "--json").stdout)["traffic"]["rows"] == 0


def test_a_folder_without_traffic_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--learn-dir of a server"):
        run("status", "--dir", str(tmp_path))


def test_train_reports_as_json_and_ends_with_3_if_nothing_is_gained(
    checkpoint: Checkpoint, folder: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.learn.training.yielding.lower_priority", lambda nice: None)
    out = tmp_path / "candidate"
    arguments = (
        *("train", str(checkpoint.source), "--from", str(folder), "--head", str(head), "--out", str(out)),
        *("--steps", "2", "--batch-tokens", "256", "--device", "cpu", "--json"),
    )
    monkeypatch.setattr(EarlyStop, "evaluate", lambda self, step: False)  # no step gains anything
    result = run(*arguments)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == NOTHING_BETTER
    assert lines[0]["step"] == 0
    assert set(lines[0]["tokens_per_pass"]) == {"new"}
    assert lines[-1] == {"candidate": None, "stopped": False}
    assert read_candidate(out) is None
    with pytest.raises(ConfigError, match="either --steps or --minutes"):
        run(*arguments, "--minutes", "1")


def test_the_loop_by_hand_trains_judges_and_promotes_a_candidate(
    checkpoint: Checkpoint, folder: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.learn.training.yielding.lower_priority", lambda nice: None)
    candidate, model = tmp_path / "candidate", (str(checkpoint.source), "--from", str(folder))
    train = ("train", *model, "--batch-tokens", "256", "--learning-rate", "2e-2", "--device", "cpu")
    score = ("score", *model, "--candidate", str(candidate), "--device", "cpu")
    began = time.time()
    assert run(*train, "--head", str(head), "--steps", "24", "--out", str(candidate)).exit_code == 0
    copied = began + 3600  # rows that came during the training are new, whatever the file's time
    os.utime(candidate / "candidate.json", (copied, copied))
    judged = run(*score, "--head", str(head))
    assert (judged.exit_code, "passes: " in judged.output) == (0, True)
    run("promote", str(candidate), "--dir", str(folder))
    history = History(LearnFolder(folder).heads, head)
    assert history.current().number == 1
    assert history.card(1)["evidence"]["rows"]["train"] > 0
    assert began <= history.trained(1) < copied
    # from now on the current head is the one that was promoted, and its rows are old
    with pytest.raises(ConfigError, match="too few rows to learn from: 0 to train on"):
        run(*train, "--steps", "1", "--out", str(tmp_path / "next"))
    judged = run(*score)
    assert (judged.exit_code, "is refused: " in judged.output) == (NOTHING_BETTER, True)
    with pytest.raises(ConfigError, match="has no candidate"):
        run("promote", str(tmp_path / "none"), "--dir", str(folder))
    card = candidate / "candidate.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "target": "0" * 16}))
    with pytest.raises(ConfigError, match="was trained for another target"):
        run("promote", str(candidate), "--dir", str(folder))
    assert history.current().number == 1
