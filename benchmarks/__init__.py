"""Measurements that only developers of paceline take. Not in the wheel: see docs/benchmarks.md."""
