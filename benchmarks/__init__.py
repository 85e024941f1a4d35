"""Benchmarks for developers of paceline. Not in the wheel: see docs/guides/benchmarks.md."""
