"""Prompts that the model writes itself: it continues its chat template at the user's turn.

An instruction-tuned model has seen so many user turns that it writes plausible ones. Some get their
first words given, so that kinds of requests that a model seldom writes occur too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.train.data.answers import Answerer, Next, Watch, patient, seed_of
from paceline.train.data.prompts import Prompt, Skipped

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

MARK = "9c1e5b7f04"  # a text that occurs in no template
FREE = ("",) * 8
OPENINGS = (
    *FREE,
    "Write a Python function",
    "Write a Python program",
    "Complete the following Python code:\n```python\ndef",
    "Fix the bug in this code:\n```python\n",
    "Write a story",
    "Explain",
    "Summarize the following",
    "Rewrite the following",
    "Translate",
    "What",
    "How",
    "Solve",
)


def before_user_turn(tokenizer: Tokenizer) -> str:
    """What the chat template writes before the text of the first user turn."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": MARK}])
    if MARK not in chat:
        raise ConfigError(
            "The model's chat template does not show what users write, so the model cannot write prompts: "
            "give a file of prompts with --data."
        )
    return chat.split(MARK)[0]


def self_written(
    tokenizer: Tokenizer,
    answerer: Answerer,
    number: int,
    skipped: Skipped,
    seed: int,
    batch_size: int,
    max_tokens: int = 256,
    openings: Sequence[str] = OPENINGS,
    watch: Watch = patient,
) -> Iterator[Prompt]:
    """At most `number` prompts. Turns that are empty or longer than `max_tokens` are counted in `skipped`.

    There are fewer if `watch` stops the run.
    """
    before = before_user_turn(tokenizer)
    starts = [tokenizer.encode(before + opening, add_special_tokens=False) for opening in openings]
    for first in range(0, number, batch_size):
        numbers = range(first, min(first + batch_size, number))
        chosen = [index % len(openings) for index in numbers]
        seeds = [seed_of(seed, f"self-{name}") for name in numbers]
        beginnings = [starts[index] for index in chosen]
        turns = answerer.answer(beginnings, [1.0] * len(chosen), seeds, max_tokens, watch)
        for name, index, turn in zip(numbers, chosen, turns, strict=True):
            if turn is None:
                continue
            text = openings[index] + tokenizer.decode(turn)
            if not turn or turn[-1] not in tokenizer.eos_ids:
                skipped.add("a self-written prompt that does not end", f"self-{name}")
            elif not text.strip():
                skipped.add("empty", f"self-{name}")
            else:
                yield Prompt(f"self-{name}", "self", messages=[{"role": "user", "content": text}])
        if watch(0, 0) is not Next.GO_ON:
            return
