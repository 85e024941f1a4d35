"""What holds for every file of the package: no circle of imports, and predicates that do not act."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import paceline

PREDICATE = re.compile(r"_?(is|has|can|may|must|should|needs|uses|fits|supports|wants|takes)(_|$)")
CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popleft", "remove", "update"}


def changes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The attributes that a function sets, deletes, or changes by a method of a container."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            owner = node if isinstance(node, ast.Attribute) else node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value if node.func.attr in CHANGING else node
        else:
            continue
        if isinstance(owner, ast.Attribute):
            yield ast.unparse(owner)


def acting_predicates(sources: Iterable[str]) -> list[str]:
    """`function: attribute` of every predicate that changes an attribute."""
    return [
        f"{node.name}: {changed}"
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and PREDICATE.match(node.name)
        for changed in changes(node)
    ]


def test_no_file_imports_itself_through_others() -> None:
    """Not for its types either, nor later, in a function."""
    graph = grimp.build_graph("paceline", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # CycleError names the circle


def test_predicates_do_not_act() -> None:
    files = Path(paceline.__file__).parent.rglob("*.py")
    assert acting_predicates(file.read_text() for file in files) == []


@pytest.mark.parametrize(
    "act", ["self.seen = 1", "del self.seen[0]", "self.seen[0] += 1", "self.seen.pop()", "other.seen = 1"]
)
def test_a_predicate_that_acts_is_found(act: str) -> None:
    source = f"""
def is_new(self, other):
    {act}
    return True
"""
    assert acting_predicates([source]) == [f"is_new: {'other' if 'other' in act else 'self'}.seen"]


def test_a_predicate_may_collect_in_its_own_variables() -> None:
    assert (
        acting_predicates(["def has_all(self):\n    found = []\n    found.append(1)\n    return found"]) == []
    )
