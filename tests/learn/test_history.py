"""The heads that have served: whatever is killed or damaged, one of them serves."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.learn.evaluation import history as history_module
from paceline.learn.evaluation.history import History


@pytest.fixture
def history(tmp_path: Path) -> History:
    first = tmp_path / "shipped"
    first.mkdir()
    return History(tmp_path / "heads", first, keep=2, clock=lambda: 1000.0)


def candidate(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / "candidate"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text(text)
    (folder / "config.json").write_text("{}")
    return folder


def promoted(history: History, tmp_path: Path, *texts: str) -> None:
    for text in texts:
        history.promote(history.add(candidate(tmp_path, text), {"gain": text}).number)


def served(history: History) -> str:
    """What the files of the current head say; "first" for the one that was there before."""
    head = history.current()
    return (head.path / "model.safetensors").read_text() if head.number else "first"


def test_the_first_head_serves_until_another_is_promoted(history, tmp_path):
    assert (served(history), history.previous()) == ("first", None)
    head = history.add(candidate(tmp_path, "a"), {"gain": 1.1})
    assert served(history) == "first"  # added, not promoted
    history.promote(head.number)
    assert served(history) == "a"
    assert history.card(head.number)["evidence"] == {"gain": 1.1}
    assert history.folder.stat().st_mode & 0o077 == 0  # a head gives away what it was trained on


def test_a_rollback_brings_back_what_served_before_down_to_the_first(history, tmp_path):
    promoted(history, tmp_path, "a", "b")
    assert history.previous().number == 1
    history.rollback()
    assert served(history) == "a"
    history.rollback()
    history.rollback()
    assert served(history) == "first"
    history.promote(2)  # by hand, and forward again
    assert served(history) == "b"


def test_a_damaged_head_is_passed_over_for_the_one_before(history, tmp_path):
    promoted(history, tmp_path, "a", "b")
    (tmp_path / "heads/0002/model.safetensors").write_text("B")  # another byte
    assert served(history) == "a"
    (tmp_path / "heads/0001/config.json").unlink()
    assert served(history) == "first"
    with pytest.raises(ConfigError, match="no intact head 2"):
        history.promote(2)


@pytest.mark.parametrize("content", ["", "{", '{"number": "x"}', "[]", '{"number": 7, "before": []}'])
def test_a_damaged_pointer_leaves_the_first_head(history, tmp_path, content):
    promoted(history, tmp_path, "a")
    (tmp_path / "heads/current").write_text(content)
    assert served(history) == "first"
    promoted(history, tmp_path, "b")
    assert served(history) == "b"


def test_what_a_killed_process_left_unfinished_is_not_used(history, tmp_path):
    promoted(history, tmp_path, "a")
    (tmp_path / "heads/unfinished").mkdir()
    (tmp_path / "heads/unfinished/model.safetensors").write_text("half")
    (tmp_path / "heads/current.unfinished").write_text('{"numb')
    assert served(history) == "a"
    promoted(history, tmp_path, "b")
    assert served(history) == "b"


class Killed(BaseException):
    """The process ends here: nothing after it runs, as after kill -9."""


def test_a_kill_before_any_write_leaves_a_whole_head_that_serves(tmp_path, monkeypatch):
    """Every place where a promotion touches the disk, and every one of a rollback."""
    writes = [(os, "replace"), (shutil, "copytree"), (history_module, "_write"), (history_module, "_sync")]
    for kill in range(40):
        folder = tmp_path / str(kill)
        folder.mkdir()
        history = History(folder / "heads", folder, keep=2, clock=lambda: 1.0)
        promoted(history, folder, "a")
        left = kill

        def counted(run):
            def last(*given):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return run(*given)

            return last

        with monkeypatch.context() as patches:
            for module, name in writes:
                patches.setattr(module, name, counted(getattr(module, name)))
            try:
                promoted(history, folder, "b")
                history.rollback()
                history.note("rolled back")
                ended = True
            except Killed:
                ended = False
        after = History(folder / "heads", folder, keep=2, clock=lambda: 2.0)
        assert served(after) in ("a", "b")
        promoted(after, folder, "c")
        assert served(after) == "c"
        if ended:
            break
    assert 8 <= kill < 39


def test_old_heads_are_deleted_but_never_the_current_one_or_the_last_before_it(history, tmp_path):
    promoted(history, tmp_path, *"abcdef")
    assert history.numbers() == [4, 5, 6]
    history.rollback()
    assert served(history) == "e"


def test_decisions_are_read_back_and_a_damaged_line_is_skipped(history, tmp_path):
    history.note("rejected", reason="no gain")
    with (tmp_path / "heads/decisions.jsonl").open("a") as file:
        file.write("{half a li\n")
    history.note("promoted", number=1)
    assert [line["decision"] for line in history.decisions()] == ["rejected", "promoted"]
    assert json.dumps(history.decisions()[0]["time"]) == "1000.0"
