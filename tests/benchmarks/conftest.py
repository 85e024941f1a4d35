"""The tiny model of tests/bench."""

from tests.bench.conftest import tiny_file, tiny_gguf

__all__ = ["tiny_file", "tiny_gguf"]
