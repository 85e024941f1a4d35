"""The command `paceline bench gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from paceline.bench.reporting import JsonFile, Report, integers

if TYPE_CHECKING:
    from paceline.bench.gpu import Measured

DEFAULT_SHAPES = "llama-3.2-1b,qwen2.5-1.5b,llama-3.1-8b"


def gpu_command(
    shapes: Annotated[str, typer.Option(help="Shapes of models, whose weights are random.")] = DEFAULT_SHAPES,
    requests: Annotated[str, typer.Option(help="Numbers of requests that decode at once.")] = "1,16,64",
    input_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 256,
    json_file: JsonFile = None,
) -> None:
    """Plain greedy decoding on a CUDA device, beside the same model in plain torch."""
    from paceline.bench.gpu import measure_gpu
    from paceline.bench.tables import progress

    report = Report(json_file)
    names, counts = [name.strip() for name in shapes.split(",")], integers("--requests", requests)
    with progress(2 * len(names) * len(counts)) as on_turn:
        lines = measure_gpu(
            names,
            counts,
            input_tokens,
            output_tokens,
            lambda line: on_turn(f"{line.shape}, {line.requests} requests"),
        )
    report.show([gpu_table(lines)], [], {"lines": [asdict(line) for line in lines]})


def gpu_table(lines: Sequence[Measured]) -> Table:
    """Milliseconds per token, by shape and number of requests."""
    table = Table(title="Plain decoding on the GPU, random weights, greedy", title_justify="left")
    for heading in ("shape", "engine"):
        table.add_column(heading)
    for heading in ("requests", "ms/token", "tokens/s", "ms to read the weights"):
        table.add_column(heading, justify="right")
    for line in lines:
        table.add_row(
            line.shape,
            line.engine,
            str(line.requests),
            f"{line.milliseconds:.3f}",
            f"{line.tokens_per_second:,.0f}",
            f"{line.floor:.3f}",
        )
    return table
