"""transformers reads GGUF files by one reader for each, in tests: the gguf package takes seconds to make one.

It makes arrays of every word of the vocabulary. transformers makes a reader whenever it looks into a file,
and converts all words of it, also where it loads a model, which has no use for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

MANY_WORDS = 1000  # more than that in one field is a vocabulary


class _Reader(gguf.GGUFReader):
    """Reads a plain array: of a memmap each slice takes three times as long, and a word has several."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = mapped.view(np.ndarray)


_reader = cache(_Reader)
_names = cache(gguf.get_tensor_name_map)


def _reader_without_words(path: Path) -> gguf.GGUFReader:
    reader = copy.copy(_reader(path))
    reader.fields = {name: field for name, field in reader.fields.items() if len(field.data) < MANY_WORDS}
    return reader


@contextmanager
def read_once(words: bool) -> Iterator[None]:
    """A context in which transformers shares readers; without `words` they have no vocabulary."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(gguf, "GGUFReader", _reader if words else _reader_without_words)
        patches.setattr(gguf, "get_tensor_name_map", _names)
        yield
