"""`examples/training_tasks.py`: prompts out of texts that the target wrote."""

from __future__ import annotations

import json
import runpy
from collections import defaultdict
from pathlib import Path

TASKS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "training_tasks.py"))
PROGRAM = "def add(a, b):\n    return a + b\n" * 4
TEXTS = [
    ("text-requests", "", "1. Write a short poem about rivers.\n2. Explain tides to a child.\n3. Cut o"),
    ("text-questions", "", "1. Who wrote the first opera?\n2. **When did it rain last?**\n3. Where"),
    ("text-sentences", "Write 8 different German sentences", "1. Der Fluss ist lang.\n2. Es reg"),
    ("text-article", "", "A river rose by two meters in one night, and a bridge was closed."),
    ("text-passage", "", "The river is long.\n**Question:** How long is it?\nQuestion: Where is it?"),
    ("text-program", "", f"Here it is:\n```python\n{PROGRAM}```"),
]


def test_what_was_written_is_asked_translated_summarized_read_and_edited() -> None:
    made = defaultdict(list)
    for row in TASKS["tasks"](TEXTS, 64, 0):
        made[row["segment"]].append(row["messages"][-1]["content"])
    assert sorted(made["chat"]) == ["Explain tides to a child.", "Write a short poem about rivers."]
    assert sorted(made["qa"]) == ["When did it rain last?", "Who wrote the first opera?"]
    assert ["Der Fluss ist lang." in text for text in made["translation"]] == [True]
    assert all("two meters" in text for text in made["summarization"])
    assert sorted("How long is it?" in text for text in made["rag"]) == [False, True]
    assert all("The river is long." in text for text in made["rag"])
    assert all(f"```python\n{PROGRAM}```" in text for text in made["edit"])
    assert len(made["edit"]) >= 2


def test_every_template_can_be_filled_and_functions_are_json() -> None:
    rows = list(TASKS["tasks"]([], 1600, 1)) + list(TASKS["text_prompts"](200, 1))
    assert all(row["messages"][-1]["content"].strip() for row in rows)
    assert not any("{noun}" in row["messages"][-1]["content"] for row in rows)
    calls = [row["messages"][0]["content"] for row in rows if row["segment"] == "tools"]
    for call in calls:
        tool, _ = json.JSONDecoder().raw_decode(call[call.index('{"name"') :])
        assert tool["parameters"]["required"]
