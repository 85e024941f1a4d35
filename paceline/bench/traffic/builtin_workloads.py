"""Built-in workloads, made from Python's own sources and texts and from invented records.

They differ slightly between versions of Python: compare only results of the same version.
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

Line = dict[str, Any]  # in the format of a workload file

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
MAX_LINES = 32  # of a function; longer ones are cut
TOPICS = ("assert", "break", "context-managers", "del", "global", "import", "lambda", "pass", "return", "try")
MAX_CHARACTERS = 1800  # of a text to summarise
INSTRUCTIONS = (
    "Add type annotations to all parameters and to the return value, and change nothing else.",
    "Rename this function to `renamed_function`, and change nothing else.",
)
CITIES = ("Lisbon", "Nairobi", "Oslo", "Quito", "Seoul", "Tunis")
GOODS = ("lamps", "chairs", "bicycles", "kettles", "maps", "tents")
QUESTIONS = (
    "My bread does not rise. What are the three likeliest reasons, and how do I find out which it is?",
    "Explain to a child of ten why the moon has phases.",
    "I have two job offers: one pays more, the other is closer to home. How should I decide?",
    "What is the difference between a stack and a queue? Give one everyday example of each.",
    "Plan a quiet weekend for two people in a small town by the sea, in October.",
    "How do I remove a red wine stain from a wool carpet?",
    "Which questions should I ask before I rent a flat?",
    "Why do some metals rust and others do not?",
    "Give me five ideas for a birthday of a friend who likes maps.",
    "What should I know before I keep chickens in the garden?",
)
SUBJECTS = (
    ("a lighthouse keeper who receives letters from the future", "short story"),
    ("the first frost of the year", "poem without rhymes"),
    ("two clocks in one house that disagree", "dialogue"),
    ("a market where people trade memories", "short story"),
    ("a river that forgot the way to the sea", "fable"),
    ("an old bicycle", "monologue"),
    ("a village that moves every seven years", "travel report"),
    ("the last cinema of a city", "short story"),
)
FORMS = tuple(dict.fromkeys(form for _, form in SUBJECTS))
FORMS_OF_ONE = 4  # forms per subject
NAMES = ("Ada Moss", "Ben Okafor", "Chen Li", "Dora Blum", "Emil Strand", "Fatou Diop")


def code_edit() -> Iterator[Line]:
    """Functions of the standard library, to be copied with a small change."""
    for number, function in enumerate(FUNCTIONS):
        source = "\n".join(inspect.getsource(function).splitlines()[:MAX_LINES])
        ask = f"{INSTRUCTIONS[number % 2]} Answer with the whole function in one code block."
        yield _line(f"{function.__module__}.{function.__name__}", f"{ask}\n```python\n{source}\n```", 256)


def summarize() -> Iterator[Line]:
    """Chapters of Python's help, to be summarised."""
    from pydoc_data.topics import topics  # here, because it is large

    for name in TOPICS:
        text = topics[name].strip()[:MAX_CHARACTERS]
        yield _line(name, f"Summarize this text in a few sentences.\n\n{text}", 160)


def extract() -> Iterator[Line]:
    """Invented deliveries in prose, to be written as JSON."""
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


def chat() -> Iterator[Line]:
    """Questions as people ask them."""
    for number, question in enumerate(QUESTIONS):
        yield _line(f"question-{number}", question, 192)


def writing() -> Iterator[Line]:
    """Free writing at temperature 1: the hardest to draft for."""
    for turn in range(FORMS_OF_ONE):
        for number, (subject, usual_form) in enumerate(SUBJECTS):
            form = FORMS[(FORMS.index(usual_form) + turn) % len(FORMS)]
            ask = f"Write a {form} about {subject}. Surprise me."
            yield {**_line(f"piece-{turn * len(SUBJECTS) + number}", ask, 224), "temperature": 1.0}


def _line(name: str, content: str, max_tokens: int) -> Line:
    return {"id": name, "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}


BUILT_IN: dict[str, Callable[[], Iterator[Line]]] = {
    "code-edit": code_edit,
    "summarize": summarize,
    "extract": extract,
    "chat": chat,
    "writing": writing,
}
