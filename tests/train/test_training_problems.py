"""`examples/training_problems.py`: prompts that differ, with examples that are right."""

from __future__ import annotations

import random
import re
import runpy
from pathlib import Path

PROBLEMS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "training_problems.py"))


def test_prompts_differ_and_are_of_both_kinds(tmp_path: Path) -> None:
    source = 'def twice(x):\n    """Return x twice."""\n' + "    y = x  # as it is\n" * 8
    (tmp_path / "one.py").write_text(source)
    question = [{"role": "user", "content": "Ann has 12 apples and 1/2 of 30 pears. How many?"}]
    rows = list(PROBLEMS["problems"](200, [question], [tmp_path], seed=3))
    texts = [row["messages"][0]["content"] for row in rows]
    assert len(set(texts)) == len({row["id"] for row in rows}) == 200
    assert {row["segment"] for row in rows} == {"math", "code"}
    assert any("def twice(x):" in text and "Return x twice." in text for text in texts)
    assert rows == list(PROBLEMS["problems"](200, [question], [tmp_path], seed=3))


def test_other_numbers_are_of_the_same_kind() -> None:
    text = "Of 40 boxes 25% weigh 3.50 kg, 1/2 weigh 1 kg, and 1,200 are sold in 7 days."
    for seed in range(50):
        other = PROBLEMS["other_numbers"](text, random.Random(seed))
        assert re.sub(r"\d[\d,.]*", "#", other) == re.sub(r"\d[\d,.]*", "#", text)
        assert "1/2 weigh 1 kg" in other
        assert 1 < int(other.split("%")[0].split()[-1]) <= 100


def test_examples_are_what_the_parts_compute() -> None:
    kind = PROBLEMS["KINDS"][0]
    parts = [next(part for part in own if part[0] == name) for own, name in
             ((kind.kept, "even"), (kind.made, "squares"), (kind.ends, "sum"))]  # fmt: skip
    given, result = PROBLEMS["_example"](random.Random(1), kind, parts, 3)
    assert result == sum(number * number for number in given if number % 2 == 0)
