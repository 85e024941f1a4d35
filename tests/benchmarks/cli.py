"""`python -m benchmarks`, run as a developer runs it."""

from __future__ import annotations

from functools import partial

from benchmarks.__main__ import app
from tests.bench import cli

run = partial(cli.run, app=app)
run_json = partial(cli.run_json, app=app)
