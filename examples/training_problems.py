"""Prompts to train a draft head with, for mathematics and code: word problems and small functions.

    python examples/training_problems.py 30000 --questions questions.jsonl > problems.jsonl
    paceline train eagle3 qwen2.5-coder-1.5b --data problems.jsonl --out my-head

Questions are rows of a file ({"messages": [...]}), such as the training part of a public data set; each is
used as it is and with other numbers. Functions to complete are composed of a filter of a list, a map of its
elements and a reduction, with computed examples; others are documented functions of installed Python
packages.
"""

import argparse
import ast
import json
import math
import random
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]
COMPLETE = (
    "Complete this Python function. Answer with the whole function in one code block.",
    "Complete this Python function. Answer with the whole function.",
    "Implement the following function in Python. Reply with one code block.",
    "Finish this function:",
    "Write the body of this Python function.",
    "Please complete the function below.",
)
WORK = (
    "Add type annotations to this function and change nothing else. Answer with the whole function.",
    "Add type hints to the following Python code. Reply with code only.",
    "Explain what this code does.",
    "Write a docstring for this function. Answer with the whole function.",
    "Write unit tests for this function.",
    "Find possible bugs in this code and fix them.",
)
ASK = (
    "Write a Python function `{name}` that {does}.",
    "Write a function in Python that {does}.",
    "How do I write a Python function that {does}?",
    "Write a Python function that {does}. Include an example.",
    "Implement `{name}` in Python: it {does}.",
    "Write a JavaScript function that {does}.",
    "Write a Python program that {does}, and print the result for a small example.",
)


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def digit_sum(number: int) -> int:
    return sum(int(digit) for digit in str(abs(number)))


def vowels(word: str) -> int:
    return sum(letter in "aeiouAEIOU" for letter in word)


# words for a name, words for a sentence, and the function: {k} is a small number
Part = tuple[str, str, Callable[[Any, int], Any]]
NUMBER_KEPT: tuple[Part, ...] = (
    ("", "all numbers", lambda n, k: True),
    ("even", "the even numbers", lambda n, k: n % 2 == 0),
    ("odd", "the odd numbers", lambda n, k: n % 2 == 1),
    ("positive", "the positive numbers", lambda n, k: n > 0),
    ("negative", "the negative numbers", lambda n, k: n < 0),
    ("multiple", "the numbers that are divisible by {k}", lambda n, k: n % k == 0),
    ("large", "the numbers greater than {k}", lambda n, k: n > k),
    ("small", "the numbers that are at most {k}", lambda n, k: n <= k),
    ("prime", "the prime numbers", lambda n, k: is_prime(n)),
    ("square", "the perfect squares", lambda n, k: n >= 0 and math.isqrt(n) ** 2 == n),
    ("symmetric", "the numbers that read the same backwards", lambda n, k: str(abs(n)) == str(abs(n))[::-1]),
    ("two_digit", "the numbers with exactly two digits", lambda n, k: 10 <= abs(n) <= 99),
)
NUMBER_MADE: tuple[Part, ...] = (
    ("", "", lambda n, k: n),
    ("squares", "the square of each of them", lambda n, k: n * n),
    ("doubles", "the double of each of them", lambda n, k: 2 * n),
    ("absolutes", "the absolute value of each of them", lambda n, k: abs(n)),
    ("digit_sums", "the sum of the digits of each of them", lambda n, k: digit_sum(n)),
    ("remainders", "the remainder of each of them modulo {k}", lambda n, k: n % k),
    ("shifted", "each of them plus {k}", lambda n, k: n + k),
    ("distances", "the distance of each of them from {k}", lambda n, k: abs(n - k)),
    ("lengths", "the number of digits of each of them", lambda n, k: len(str(abs(n)))),
)
NUMBER_ENDS: tuple[Part, ...] = (
    ("sum", "the sum of the results", lambda xs, k: sum(xs)),
    ("product", "the product of the results, 1 if there are none", lambda xs, k: math.prod(xs)),
    ("largest", "the largest result, or None if there is none", lambda xs, k: max(xs, default=None)),
    ("smallest", "the smallest result, or None if there is none", lambda xs, k: min(xs, default=None)),
    ("count", "how many different results there are", lambda xs, k: len(set(xs))),
    ("sorted", "the results in ascending order", lambda xs, k: sorted(xs)),
    ("descending", "the results from the largest to the smallest", lambda xs, k: sorted(xs, reverse=True)),
    ("list", "a list of the results in their order", lambda xs, k: xs),
    ("unique", "the results without duplicates, in their order", lambda xs, k: list(dict.fromkeys(xs))),
    ("running", "a list of the running totals of the results", lambda xs, k: running_totals(xs)),
    ("spread", "the difference of the largest and the smallest result, 0 if there are none",
     lambda xs, k: max(xs) - min(xs) if xs else 0),
    ("average", "the average of the results, 0.0 if there are none",
     lambda xs, k: round(sum(xs) / len(xs), 2) if xs else 0.0),
    ("frequency", "a dictionary that counts how often each result occurs", lambda xs, k: counted(xs)),
    ("first", "the first {k} results", lambda xs, k: xs[:k]),
    ("pairs", "the sums of neighbouring results", lambda xs, k: [a + b for a, b in pairwise(xs)]),
)  # fmt: skip
WORD_KEPT: tuple[Part, ...] = (
    ("", "all words", lambda w, k: True),
    ("long", "the words with more than {k} letters", lambda w, k: len(w) > k),
    ("short", "the words with at most {k} letters", lambda w, k: len(w) <= k),
    ("vowel", "the words that begin with a vowel", lambda w, k: w[0] in "aeiou"),
    ("consonant", "the words that begin with a consonant", lambda w, k: w[0] not in "aeiou"),
    ("palindrome", "the palindromes", lambda w, k: w == w[::-1]),
    ("distinct", "the words without a repeated letter", lambda w, k: len(set(w)) == len(w)),
    ("even", "the words of even length", lambda w, k: len(w) % 2 == 0),
    ("e_words", "the words that contain the letter e", lambda w, k: "e" in w),
)
WORD_MADE: tuple[Part, ...] = (
    ("", "", lambda w, k: w),
    ("reversed", "each of them reversed", lambda w, k: w[::-1]),
    ("upper", "each of them in upper case", lambda w, k: w.upper()),
    ("capital", "each of them with a capital first letter", lambda w, k: w.capitalize()),
    ("ordered", "the letters of each of them in alphabetical order", lambda w, k: "".join(sorted(w))),
    ("stripped", "each of them without its vowels", lambda w, k: "".join(c for c in w if c not in "aeiou")),
    ("starts", "the first {k} letters of each of them", lambda w, k: w[:k]),
    ("doubled", "each of them with every letter twice", lambda w, k: "".join(2 * c for c in w)),
)
WORD_ENDS: tuple[Part, ...] = (
    ("list", "a list of the results in their order", lambda xs, k: xs),
    ("sentence", "the results joined by spaces", lambda xs, k: " ".join(xs)),
    ("joined", "the results joined by hyphens", lambda xs, k: "-".join(xs)),
    ("sorted", "the results in alphabetical order", lambda xs, k: sorted(xs)),
    ("longest", "the longest result, an empty string if there is none",
     lambda xs, k: max(xs, key=len, default="")),
    ("lengths", "a dictionary from each result to its length", lambda xs, k: {x: len(x) for x in xs}),
    ("letters", "how many letters the results have together", lambda xs, k: sum(len(x) for x in xs)),
    ("vowels", "how many vowels the results have together", lambda xs, k: sum(vowels(x) for x in xs)),
    ("unique", "the results without duplicates, in their order", lambda xs, k: list(dict.fromkeys(xs))),
    ("by_length", "the results from the shortest to the longest", lambda xs, k: sorted(xs, key=len)),
    ("frequency", "a dictionary that counts how often each letter occurs",
     lambda xs, k: counted("".join(xs))),
)  # fmt: skip
WORDS = """apple river level stone orange window noon garden echo table radar music silver kayak bottle
planet idea civic forest umbrella cat sun eve street ocean winter paper rotor yellow end anna lamp bread
island tree"""


def running_totals(numbers: list[int]) -> list[int]:
    return [sum(numbers[: end + 1]) for end in range(len(numbers))]


def counted(items: Any) -> dict[Any, int]:
    return {item: list(items).count(item) for item in dict.fromkeys(items)}


@dataclass(frozen=True)
class Kind:
    """Lists of one type, and the operations on them."""

    arguments: tuple[str, ...]
    hint: str
    kept: tuple[Part, ...]
    made: tuple[Part, ...]
    ends: tuple[Part, ...]
    element: Callable[[random.Random], Any]


KINDS = (
    Kind(("numbers", "values", "lst", "nums", "arr"), "int", NUMBER_KEPT, NUMBER_MADE, NUMBER_ENDS,
         lambda draw: draw.choice((draw.randint(-9, 30), draw.randint(1, 121)))),
    Kind(("words", "strings", "names"), "str", WORD_KEPT, WORD_MADE, WORD_ENDS,
         lambda draw: draw.choice(WORDS.split())),
)  # fmt: skip


def small_function(draw: random.Random) -> Messages:
    """A function to complete, with computed examples, or to write from a description."""
    kind = draw.choices(KINDS, (3, 2))[0]
    parts = [draw.choice(part) for part in (kind.kept, kind.made, kind.ends)]
    k, argument = draw.randint(2, 9), draw.choice(kind.arguments)
    name = "_".join(part[0] for part in (parts[2], parts[0], parts[1]) if part[0])
    if draw.random() < 0.4:
        name = draw.choice(("get_", "find_", "compute_")) + name
    kept, made, ends = (part[1].format(k=k) for part in parts)
    step = f", take {made}" if made else ""
    if draw.random() < 0.3:
        does = f"takes a list of {argument}, looks at {kept}{step}, and returns {ends}"
        return user(draw.choice(ASK).format(name=name, does=does))
    description = draw.choice(
        (
            f"Of the given list of {argument}, look at {kept}{step}, and return {ends}.",
            f"Given a list of {argument}, keep {kept}{step}, and return {ends}.",
            f"Return {ends}, where the results come from {kept} in {argument}{step}.",
            f"You are given a list. Consider {kept}{step}.\nYour task is to return {ends}.",
        )
    )
    results = [_example(draw, kind, parts, k) for _ in range(draw.randint(1, 3))]
    style = draw.randrange(3)
    if style == 0:
        shown = [f">>> {name}({given!r})\n{result!r}" for given, result in results]
    elif style == 1:
        shown = ["For example:", *(f"{name}({given!r}) == {result!r}" for given, result in results)]
    else:
        shown = ["Examples:", *(f"{name}({given!r}) => {result!r}" for given, result in results)]
    hinted = draw.random() < 0.5
    head = f"def {name}({argument}: List[{kind.hint}]):" if hinted else f"def {name}({argument}):"
    lines = "\n".join((*textwrap.wrap(description, 80), *draw.choice(((), ("",))), *shown))
    quotes = draw.choice(('"""', '"""', "'''"))
    body = textwrap.indent(f"{quotes}{draw.choice(('', ' ', chr(10)))}{lines}\n{quotes}", "    ")
    code = f"{'from typing import List' + 3 * chr(10) if hinted else ''}{head}\n{body}"
    return user(f"{draw.choice(COMPLETE[:1] * 3 + COMPLETE)}\n```python\n{code}\n```")


def _example(draw: random.Random, kind: Kind, parts: list[Part], k: int) -> tuple[list[Any], Any]:
    """A list, and the function's result for it."""
    (_, _, keep), (_, _, make), (_, _, end) = parts
    given = [kind.element(draw) for _ in range(draw.choice((0, 3, 4, 5, 6, 7, 8)))]
    return given, end([make(element, k) for element in given if keep(element, k)], k)


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def package_functions(folders: list[Path]) -> list[tuple[str, str]]:
    """Source and docstring of the short documented functions of Python packages."""
    functions = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if any("test" in part for part in path.relative_to(folder).parts):
                continue
            source = path.read_text(encoding="utf-8", errors="replace")
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError, RecursionError):
                continue
            lines = source.split("\n")
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                    code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                    if 150 < len(code) < 1100 and len(text) < 500:
                        functions[code] = text
    return list(functions.items())


def package_work(functions: list[tuple[str, str]]) -> Callable[[random.Random], Messages]:
    def make(draw: random.Random) -> Messages:
        code, text = draw.choice(functions)
        if draw.random() < 0.25:
            return user(f"{draw.choice(WORK)}\n```python\n{code}\n```")
        before = re.split("\"\"\"|'''", code)[0].rstrip()
        body = textwrap.indent(f'"""{text}\n"""', "    ")
        return user(f"{draw.choice(COMPLETE)}\n```python\n{before}\n{body}\n```")

    return make


def other_numbers(text: str, draw: random.Random) -> str:
    """The text with other numbers of similar size; 0, 1 and fractions stay."""

    def other(match: re.Match[str]) -> str:
        number = match.group().replace(",", "")
        if "." in number:
            whole, part = number.split(".")
            return f"{draw.randint(1, 2 * int(whole) + 2)}.{part}"
        if int(number) < 2:
            return match.group()
        size, percent = int(number), text[match.end() :][:1] == "%"
        high = min(2 * size, 100) if percent and size <= 100 else 2 * size
        step = 10 if size % 10 == 0 and size > 20 else 1
        return str(max(2, draw.randint(size // 2, high) // step * step))

    return re.sub(r"(?<![\d/.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\d/])", other, text)


def variants(rows: list[Messages]) -> Callable[[random.Random], Messages]:
    def make(draw: random.Random) -> Messages:
        messages = draw.choice(rows)
        if draw.random() < 0.3:
            return messages
        return [{**message, "content": other_numbers(message["content"], draw)} for message in messages]

    return make


def problems(number: int, questions: list[Messages], folders: list[Path], seed: int) -> Iterator[Any]:
    kinds: list[tuple[str, int, Callable[[random.Random], Messages]]] = [("code", 3, small_function)]
    if functions := package_functions(folders):
        kinds.append(("code", 3, package_work(functions)))
    if questions:
        kinds.append(("math", 6, variants(questions)))
    draw = random.Random(seed)
    seen = set()
    while len(seen) < number:
        segment, _, make = draw.choices(kinds, [share for _, share, _ in kinds])[0]
        messages = make(draw)
        key = json.dumps(messages)
        if key not in seen:
            seen.add(key)
            yield {"id": f"problem-{seed}-{len(seen)}", "segment": segment, "messages": messages}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("number", type=int)
    parser.add_argument("--questions", type=Path, help="a file of chats, one JSON object a line")
    parser.add_argument("--packages", type=Path, action="append", help="a folder of Python sources")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    questions = []
    if given.questions:
        try:
            rows = [
                json.loads(line) for line in given.questions.read_text(encoding="utf-8").split("\n") if line
            ]
            questions = [row["messages"] for row in rows if row.get("segment", "math") == "math"]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            parser.error(f"--questions {given.questions}: {error!r}. Give one object with messages a line.")
    folders = given.packages or [Path(json.__file__).parent.parent]
    for row in problems(given.number, questions, folders, given.seed):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
