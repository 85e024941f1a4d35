"""`--config FILE`: flags from a file, which the command line overrides; mistakes are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.terminal import chat as chat_room


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options that `paceline chat` received; no model is loaded."""
    seen: dict[str, Any] = {}

    def note(model: str, engine: dict[str, Any], sampling: dict[str, Any], system: str | None) -> None:
        seen.update(model=model, system=system, **engine, **sampling)

    monkeypatch.setattr(chat_room, "chat", note)
    return seen


def test_a_config_file_sets_flags_that_are_not_given(
    tmp_path: Path, paceline: Any, asked: dict[str, Any]
) -> None:
    tuned = {"method": "suffix", "num_speculative_tokens": 4}
    values = {"model": "mine.gguf", "speculative_config": tuned, "max-num-seqs": 3, "stop": ["a", "b"]}
    (tmp_path / "tuned.json").write_text(
        json.dumps({**values, "temperature": 0, "enable_prefix_caching": False})
    )
    code, _, err = paceline("chat", "--config", str(tmp_path / "tuned.json"), "--temperature", "0.5")
    assert code == 0, err
    assert (asked["model"], json.loads(asked["speculative_config"])) == ("mine.gguf", tuned)
    assert (asked["max_num_seqs"], asked["stop"], asked["enable_prefix_caching"]) == (3, ["a", "b"], False)
    assert asked["temperature"] == 0.5
    assert asked["top_p"] == 0.95


def test_a_config_file_may_use_a_flags_alias(tmp_path: Path, paceline: Any, asked: dict[str, Any]) -> None:
    (tmp_path / "short.json").write_text('{"draft": "off"}')
    code, _, err = paceline("chat", "other", "--config", str(tmp_path / "short.json"))
    assert code == 0, err
    assert (asked["model"], asked["speculative_config"]) == ("other", "off")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[1]", "must be an object"),
        ('{"max_num_seq": 3}', "did you mean 'max_num_seqs'"),
        ('{"config": "x"}', "unknown option 'config'"),
        ('{"max_num_seqs": "many"}', "Invalid value for '--max-num-seqs'"),
    ],
)
def test_a_mistake_in_a_config_file_is_reported(
    tmp_path: Path, paceline: Any, text: str, message: str
) -> None:
    (tmp_path / "wrong.json").write_text(text)
    code, _, err = paceline("chat", "--config", str(tmp_path / "wrong.json"))
    assert code == 2
    assert message in err
    assert "Traceback" not in err
