"""Files that share what is slow to set up run in one process; every test runs once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.scheduling import FIRST, GROUPS, Scheduling

ROOT = Path(__file__).parents[1]


class Node:
    """A process that is given tests."""

    shutting_down = False
    gateway = SimpleNamespace(id="node")

    def __init__(self) -> None:
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_what_is_named_exists() -> None:
    named = [*(file for files in GROUPS.values() for file in files), *(name for name in FIRST if "/" in name)]
    assert [file for file in named if not (ROOT / file).is_file()] == []
    assert len(named) == len(set(named))
    assert GROUPS.keys() <= set(FIRST)


def test_groups_stay_together_and_the_longest_go_first() -> None:
    files = ["tests/a.py", *GROUPS["server"], "tests/b.py", *GROUPS["lossless"], "tests/c.py", FIRST[-1]]
    tests = [f"{file}::test_{number}" for file in files for number in range(4)]
    config: Any = SimpleNamespace(option=SimpleNamespace(loadscopereorder=False, tx=["2*popen"]))
    config.getvalue = lambda name: config.option.tx
    scheduling = Scheduling(config)
    nodes: list[Any] = [Node(), Node()]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, tests)
    scheduling.schedule()
    done: list[list[str]] = [[], []]
    while scheduling.has_pending:
        for node, names in zip(nodes, done, strict=True):
            if len(names) < len(node.given):
                index = node.given[len(names)]
                names.append(tests[index].split("::")[0])
                scheduling.mark_test_complete(node, index)
    assert sorted(done[0] + done[1]) == sorted(files * 4)
    first, second = ([file for file in GROUPS[name] for _ in range(4)] for name in ("lossless", "server"))
    assert done[0][: len(first)] == first
    assert done[1][: len(second)] == second
    assert FIRST[-1] in (done[0][len(first)], done[1][len(second)])
