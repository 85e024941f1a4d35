"""Small workloads that need no file: made from Python's own sources and texts, and from made-up records.

They differ a little between versions of Python, so compare only what was measured with one of them.
"""

from __future__ import annotations

import fnmatch
import heapq
import inspect
import json
import random
import shlex
import statistics
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

Line = dict[str, Any]  # as a workload's file has them

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    textwrap.shorten,
    textwrap.dedent,
    textwrap.indent,
    fnmatch.filter,
    shlex.split,
    shlex.quote,
    heapq.merge,
    heapq.nsmallest,
    statistics.fmean,
    statistics.harmonic_mean,
    statistics.median_grouped,
    statistics.covariance,
)
MOST_LINES = 32  # of a function: longer ones lose their end
TOPICS = ("assert", "break", "context-managers", "del", "global", "import", "lambda", "pass", "return", "try")
MOST_CHARACTERS = 1800  # of a text to summarise
INSTRUCTIONS = (
    "Add type annotations to all parameters and to the return value, and change nothing else.",
    "Rename this function to `renamed_function`, and change nothing else.",
)
CITIES = ("Lisbon", "Nairobi", "Oslo", "Quito", "Seoul", "Tunis")
GOODS = ("lamps", "chairs", "bicycles", "kettles", "maps", "tents")
NAMES = ("Ada Moss", "Ben Okafor", "Chen Li", "Dora Blum", "Emil Strand", "Fatou Diop")


def code_edit() -> Iterator[Line]:
    """Functions of the standard library, to be copied with a small change."""
    for number, function in enumerate(FUNCTIONS):
        source = "\n".join(inspect.getsource(function).splitlines()[:MOST_LINES])
        ask = f"{INSTRUCTIONS[number % 2]} Answer with the whole function in one code block."
        yield _line(f"{function.__module__}.{function.__name__}", f"{ask}\n```python\n{source}\n```", 256)


def summarize() -> Iterator[Line]:
    """Chapters of Python's own help, to be summarised."""
    from pydoc_data.topics import topics  # here: it is large

    for name in TOPICS:
        text = topics[name].strip()[:MOST_CHARACTERS]
        yield _line(name, f"Summarize this text in a few sentences.\n\n{text}", 160)


def extract() -> Iterator[Line]:
    """Made-up deliveries, told in sentences, to be written as JSON."""
    rng = random.Random(7)
    for number in range(10):
        sentences = []
        for _ in range(5):
            name, goods, city = rng.choice(NAMES), rng.choice(GOODS), rng.choice(CITIES)
            day = f"2026-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
            sentences.append(f"On {day}, {name} ordered {rng.randint(2, 90)} {goods} for delivery to {city}.")
        shape = json.dumps({"name": "...", "date": "...", "count": 0, "goods": "...", "city": "..."})
        ask = f"Write these orders as a JSON list of objects like {shape}. Answer with the JSON only."
        yield _line(f"orders-{number}", f"{ask}\n\n{' '.join(sentences)}", 256)


def _line(name: str, content: str, max_tokens: int) -> Line:
    return {"id": name, "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}


BUILT_IN: dict[str, Callable[[], Iterator[Line]]] = {
    "code-edit": code_edit,
    "summarize": summarize,
    "extract": extract,
}
