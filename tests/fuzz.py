"""`make fuzz`: property tests with fresh seeds, round after round, until the time is up or one fails.

    python -m tests.fuzz MINUTES [pytest arguments]

A failing example is printed as the `@example(...)` line that pins it; put it above the test. What
failed is also kept in .hypothesis/examples and tried first the next time.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

FAILED = re.compile(r"(?:Falsifying example|Failing test case)\w*: \w+(\(.*\))", re.DOTALL)


def main(minutes: float, arguments: list[str]) -> int:
    """Runs rounds; the exit status of the first that fails, or 0."""
    until, number = time.time() + 60 * minutes, 0
    plugins = ["xdist.plugin", "_hypothesis_pytestplugin", "tests.fuzz"]
    command = [sys.executable, "-m", "pytest", *(f"-p{plugin}" for plugin in plugins)]
    command += [
        "--hypothesis-profile=fuzz",
        "-m",
        "hypothesis or fuzz",
        "--numprocesses=2",
        "--dist=loadfile",
    ]
    while time.time() < until:
        number += 1
        print(f"round {number}, {(until - time.time()) / 60:.1f} minutes left", flush=True)
        order = f"--fuzz-order={secrets.token_hex(4)}"
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
        status = subprocess.run(
            [*command, order, f"--fuzz-until={until}", *arguments], env=environment
        ).returncode
        if status:
            print("Put the @example(...) line of what failed above its test, then mend it.")
            return status
    print(f"no failure in {number} rounds")
    return 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-until", type=float, default=float("inf"), help="skip tests after this time")
    parser.addoption("--fuzz-order", default="", help="what the order of the test files follows from")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files in another order each round: each has its turn, however short the time."""
    order = config.getoption("--fuzz-order")
    items.sort(key=lambda item: hashlib.sha256(f"{order} {item.path}".encode()).digest())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.getoption("--fuzz-until"):
        pytest.skip("the time is up")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.excinfo is not None and isinstance(item, pytest.Function):
        given = getattr(getattr(item.obj, "hypothesis", None), "inner_test", None)
        names = list(inspect.signature(given).parameters) if given else []
        drawn = set(names) - set(item.funcargs)
        report.sections += [("to pin", line) for line in pins(call.excinfo.value, drawn)]
    return report


def pins(error: BaseException, drawn: set[str]) -> Iterator[str]:
    """The `@example` lines of a failure, with the arguments that hypothesis drew."""
    for inner in getattr(error, "exceptions", ()):
        yield from pins(inner, drawn)
    for note in getattr(error, "__notes__", ()):
        if match := FAILED.search(note):
            yield _as_example(match.group(1), drawn)


def _as_example(arguments: str, drawn: set[str]) -> str:
    try:
        call = ast.parse("example" + arguments, mode="eval").body
    except SyntaxError:  # an argument does not print as Python
        return f"no @example can be written for {arguments}: use the @reproduce_failure line above"
    assert isinstance(call, ast.Call)
    call.keywords = [keyword for keyword in call.keywords if keyword.arg in drawn]
    if "data(...)" in map(ast.unparse, (keyword.value for keyword in call.keywords)):
        return "an @example cannot hold st.data(): use the @reproduce_failure line above"
    return f"@{ast.unparse(call)}"


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
