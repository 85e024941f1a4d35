"""The commands of `paceline bench`, for users. Developers' benchmarks are in `benchmarks/`."""

from __future__ import annotations

import shlex
from typing import Any

from paceline.bench.decode.command import decode_command
from paceline.bench.flags import RUN, MainCommandGroup
from paceline.bench.run.command import run_command, serve_command
from paceline.bench.simulate.command import simulate_command
from paceline.bench.tune.command import tune_command
from paceline.errors import ConfigError
from paceline.terminal.help import App

# former commands, now `python -m benchmarks NAME` in a checkout
MOVED = frozenset(
    {
        *("changes", "concurrency", "drafting", "gpu", "grid", "head", "load", "overhead", "perplexity"),
        *("rows", "same-bytes"),
    }
)


class BenchGroup(MainCommandGroup):
    """A group that tells users where moved commands are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] in MOVED:
            raise ConfigError(
                f"`paceline bench {args[0]}` has moved: it is a measurement for developers of paceline, not "
                f"installed with it. In a checkout run `python -m benchmarks {shlex.join(args)}`."
            )
        return super().parse_args(ctx, args)


app = App(
    help="Measure speed on this machine and your traffic: `paceline bench MODEL`, or a command below.",
    epilog=f"`paceline bench MODEL ...` is `paceline bench {RUN} MODEL ...`. A model that has the name of a "
    "command is written as a path: ./decode. Measurements for developers are in `python -m benchmarks`, in a "
    "checkout.",
    cls=BenchGroup,
    no_args_is_help=True,
)
app.command(RUN)(run_command)
app.command("speculation", help=f"The same as {RUN}.", hidden=True)(run_command)
app.command("serve")(serve_command)
app.command("tune")(tune_command)
app.command("simulate")(simulate_command)
app.command("decode")(decode_command)
