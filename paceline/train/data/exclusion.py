"""Prompts that are measured with, which must not be trained on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.train.data.prompts import Prompt, Skipped, read_prompts

WORDS = 12  # in a row that two prompts have in common by more than chance
_WORD = re.compile(r"\w+")


class Excluded:
    """The prompts of files. A prompt is `in` it if it has 12 words in a row that one of them has.

    Words that several of them have are their instructions, such as to complete a function, and do not count.
    Of a prompt of fewer words all count.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        counts: Counter[tuple[str, ...]] = Counter()
        for path in paths:
            for prompt in read_prompts(path, Skipped()):
                counts.update(set(_runs(prompt)))
        self._runs = {run for run, count in counts.items() if count == 1 or len(run) < WORDS}

    def __contains__(self, prompt: object) -> bool:
        return isinstance(prompt, Prompt) and any(run in self._runs for run in _runs(prompt))


def _runs(prompt: Prompt) -> Iterator[tuple[str, ...]]:
    """Each 12 words in a row of what a user says; all words, if they are fewer."""
    texts = [prompt.text or ""]
    if prompt.messages is not None:
        texts = [str(message["content"]) for message in prompt.messages if message["role"] == "user"]
    for text in texts:
        words = _WORD.findall(text.lower())
        for start in range(max(1, len(words) - WORDS + 1)):
            yield tuple(words[start : start + WORDS])
