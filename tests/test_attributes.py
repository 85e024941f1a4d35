"""Every attribute is created in `__init__`, so that reading it tells the whole state of an object."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import paceline

CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
FROM_OTHER_PACKAGES = {("Server", "should_exit")}  # class, attribute: of uvicorn.Server
Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_in(target: ast.expr, instance: str) -> Iterator[str]:
    """The attributes of `instance` that an assignment to a target sets."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from names_in(element, instance)
    elif isinstance(target, ast.Starred):
        yield from names_in(target.value, instance)
    elif isinstance(target, ast.Attribute) and getattr(target.value, "id", None) == instance:
        yield target.attr


def assigned(function: Function) -> Iterator[str]:
    """The attributes of its first parameter that a method sets."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    for node in ast.walk(function) if parameters else ():
        targets: Iterable[ast.expr] = ()
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor | ast.NamedExpr):
            annotated_only = isinstance(node, ast.AnnAssign) and node.value is None  # makes no attribute
            targets = () if annotated_only else (node.target,)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = (node.optional_vars,)
        for target in targets:
            yield from names_in(target, parameters[0].arg)


def methods(owner: ast.ClassDef) -> list[Function]:
    """Those with an instance; class methods and static methods are left out."""
    return [
        entry
        for entry in owner.body
        if isinstance(entry, ast.FunctionDef | ast.AsyncFunctionDef)
        and not {"classmethod", "staticmethod"} & {ast.unparse(each) for each in entry.decorator_list}
    ]


def born(owner: ast.ClassDef) -> set[str]:
    """The attributes that every instance has: of the class, of a dataclass's fields, of its constructor."""
    is_dataclass = any("dataclass" in ast.unparse(each) for each in owner.decorator_list)
    found = {name for each in methods(owner) if each.name in CONSTRUCTORS for name in assigned(each)}
    for entry in owner.body:
        if isinstance(entry, ast.Assign):
            found |= {target.id for target in entry.targets if isinstance(target, ast.Name)}
        elif isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            if entry.value is not None or is_dataclass:
                found.add(entry.target.id)
        elif isinstance(entry, ast.FunctionDef):  # a property may have a setter
            found.add(entry.name)
    return found


def late_attributes(sources: Iterable[str]) -> list[str]:
    """`Class.method: attribute` of every attribute that only another method than a constructor sets."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    def known(owner: ast.ClassDef) -> set[str]:
        names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in owner.bases]
        bases = [base for name in names if name != owner.name for base in classes.get(name, ())]
        others = {name for own, name in FROM_OTHER_PACKAGES if own == owner.name}
        return born(owner).union(others, *map(known, bases))

    late = []
    for owner in [each for same_name in classes.values() for each in same_name]:
        sets = {method.name: set(assigned(method)) for method in methods(owner)}
        if set().union(*sets.values()) - born(owner):
            at_birth = known(owner)
            late += [
                f"{owner.name}.{method}: {name}"
                for method, names in sets.items()
                for name in sorted(names - at_birth)
            ]
    return late


def test_every_attribute_of_the_package_is_born_in_a_constructor() -> None:
    files = Path(paceline.__file__).parent.rglob("*.py")
    assert late_attributes(file.read_text() for file in files) == []


def test_a_late_attribute_is_found_also_below_a_base_class_and_in_a_tuple() -> None:
    source = """
class Base:
    def __init__(self):
        self.known = 1

class Late(Base, Generic[T]):
    annotated: int

    def start(self):
        self.known, (self.first, *self.rest) = 1, (2, 3)
        with open() as self.file:
            self.annotated = 4

@dataclass
class Fine:
    field: int

    def change(self):
        self.field = 1
"""
    assert late_attributes([source]) == [
        f"Late.start: {name}" for name in ("annotated", "file", "first", "rest")
    ]
