"""What is measured with is not trained on."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.train.data.exclusion import Excluded
from paceline.train.data.prompts import Prompt

ORDER = "Complete the following function and answer with the whole of its code and nothing else: "
QUESTION = "A farmer has seventeen sheep and buys four more of them on each day of a week in May."


def excluded(folder: Path, *texts: str) -> Excluded:
    path = folder / "measured.jsonl"
    path.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": t}]}) for t in texts))
    return Excluded([path])


def prompt(text: str, role: str = "user") -> Prompt:
    return Prompt(
        "row", "s", messages=[{"role": role, "content": text}, {"role": "user", "content": "Go on."}]
    )


def test_twelve_words_in_a_row_are_the_same_prompt_however_it_is_written(tmp_path: Path) -> None:
    known = excluded(tmp_path, QUESTION)
    assert prompt(f"Think first. {QUESTION.upper()} How many are there?") in known
    assert Prompt("row", "s", text=QUESTION.replace(" ", "\n")) in known
    words = QUESTION.split()
    assert prompt(" ".join(words[:12])) in known
    assert prompt(" ".join(words[:11])) not in known
    assert prompt(QUESTION, role="system") not in known


def test_short_prompts_are_compared_whole(tmp_path: Path) -> None:
    known = excluded(tmp_path, "Name three colours.")
    assert Prompt("row", "s", text="name three colours") in known
    assert Prompt("row", "s", text="Name three primary colours.") not in known


def test_an_instruction_that_several_prompts_share_does_not_count(tmp_path: Path) -> None:
    known = excluded(tmp_path, ORDER + "def area(width, height)", ORDER + "def volume(edge)")
    assert prompt(ORDER + "def mean(values)") not in known
    assert prompt(ORDER + "def volume(edge)") in known
