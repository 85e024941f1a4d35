"""A fixed English text, for measurements that need tokens of real text."""

from __future__ import annotations

from importlib import resources
from itertools import cycle, islice
from typing import TYPE_CHECKING

from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer


def perplexity_text() -> str:
    """The fixed text: English prose, dialogue, facts and some code, about 2,000 words."""
    return resources.files("paceline.bench").joinpath("data/perplexity.txt").read_text(encoding="utf-8")


def text_ids(tokenizer: Tokenizer, count: int | None = None) -> list[int]:
    """The token ids of the fixed text: all, or `count` of them, repeated if it is too short."""
    ids = tokenizer.encode(perplexity_text())
    if not ids:
        raise RequestError("This model's tokenizer has no tokens for English text; use a model with its own.")
    return ids if count is None else list(islice(cycle(ids), count))
