"""The controller's memory file: whatever happens to it, an engine starts, and ends."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import home
from paceline.control.memory import MAX_BYTES, Memory
from tests.control.simulation import SimulatedDrafter, World
from tests.control.test_auto import controller


def world() -> World:
    return World({"d": SimulatedDrafter(lambda step: 0.5)}, max_output=10**6)


def start_and_end(memory: Memory) -> None:
    """As an engine does with its controller."""
    own = controller(world(), memory=memory)
    world().run(own, 5)
    own.close()


@pytest.fixture
def learned(tmp_path: Path) -> Memory:
    memory = Memory(tmp_path / "memory.json")
    start_and_end(memory)
    assert memory.read()["models"]
    return memory


DAMAGE = {
    "empty": b"",
    "cut": b'{"steps": {"rows": [1',
    "bytes": bytes(range(256)),
    "deep": b"[" * 100_000,
    "a list": b"[1, 2]",
    "sections that are none": b'{"steps": 1, "models": []}',
    "too long": b" " * MAX_BYTES + b"{}",
    "a number without an end": b'{"steps": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_warned_about_and_replaced(
    learned: Memory, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    learned.path.write_bytes(DAMAGE[damage])
    with caplog.at_level(logging.WARNING):
        start_and_end(learned)
    assert f"{learned.path} is damaged" in caplog.messages[0]
    caplog.clear()
    assert learned.read()["models"]
    assert caplog.messages == []


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=6,
)


def replaced(value: Any, data: st.DataObject) -> Any:
    """The value, something in it replaced by something else."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        copy = value.copy()
        copy[key] = replaced(value[key], data)
        return copy
    return data.draw(anything)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_facts_that_make_no_sense_are_ignored(learned: Memory, data: st.DataObject) -> None:
    facts = json.loads(learned.path.read_text())
    learned.path.write_text(json.dumps(replaced(facts, data)))
    start_and_end(learned)
    learned.path.write_text(json.dumps(facts))


def test_a_kill_while_it_is_written_leaves_the_old_file(
    learned: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = learned.path.read_bytes()

    def killed(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        learned.write({"steps": {}})
    assert learned.path.read_bytes() == before


def test_a_folder_that_cannot_be_written_to_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "_unwritable", set())
    (tmp_path / "costs").write_text("in the way")
    for _ in range(2):
        start_and_end(Memory(tmp_path / "costs" / "memory.json"))
    (message,) = caplog.messages
    assert "Set PACELINE_HOME" in message
    assert str(tmp_path / "costs") in message
