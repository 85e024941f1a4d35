"""`python -m benchmarks`: benchmarks for developers of paceline. See docs/guides/benchmarks.md."""

from __future__ import annotations

import signal
import sys

from benchmarks.control.commands import (
    auto_replay_command,
    bad_drafters_command,
    changes_command,
    grid_command,
)
from benchmarks.engine.commands import (
    concurrency_command,
    drafting_command,
    head_command,
    perplexity_command,
    phases_command,
    rows_command,
    same_bytes_command,
    sampling_command,
)
from benchmarks.gpu.command import gpu_command, gpu_engine_command
from benchmarks.growth.command import growth_command
from benchmarks.learning.command import (
    learning_command,
    learning_load_command,
    learning_unattended_command,
)
from benchmarks.server.commands import fleet_command, load_command, overhead_command
from benchmarks.server.replica_commands import app as replicas
from paceline.cli import main
from paceline.terminal.help import App

app = App(help="Benchmarks for developers of paceline.", no_args_is_help=True)
app.command("grid")(grid_command)
app.command("auto-replay")(auto_replay_command)
app.command("changes")(changes_command)
app.command("bad-drafters")(bad_drafters_command)
app.command("gpu")(gpu_command)
app.command("gpu-engine")(gpu_engine_command)
app.command("same-bytes")(same_bytes_command)
app.command("sampling")(sampling_command)
app.command("load")(load_command)
app.command("overhead")(overhead_command)
app.command("fleet")(fleet_command)
app.add_typer(replicas, name="replicas")
app.command("learning")(learning_command)
app.command("learning-load")(learning_load_command)
app.command("learning-unattended")(learning_unattended_command)
app.command("rows")(rows_command)
app.command("phases")(phases_command)
app.command("growth")(growth_command)
app.command("concurrency")(concurrency_command)
app.command("drafting")(drafting_command)
app.command("head")(head_command)
app.command("perplexity")(perplexity_command)

if __name__ == "__main__":
    # a benchmark that is told to stop stops the servers it started: leaving `with` blocks does that
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main(app)
