"""`paceline bench decode`: the command line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.bench.flags import HtmlFile, JsonFile, Model, Quantization, Threads
from paceline.config import DEFAULT_MODEL


def decode_command(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Number of tokens to decode after the first.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Number of prompt tokens before decoding.")] = 16,
    prefill: Annotated[int, typer.Option(help="Number of prompt tokens for the prefill measurement.")] = 512,
    rounds: Annotated[int, typer.Option(help="Number of runs of each engine.")] = 5,
    threads: Threads = None,
    quantization: Quantization = "auto",
    peer: Annotated[str, typer.Option(help="Engine to compare with: llama.cpp or none.")] = "llama.cpp",
    peer_python: Annotated[
        str, typer.Option(help="Python interpreter that has llama_cpp.", show_default="this one")
    ] = sys.executable,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Measure plain greedy decoding and prefill of one request, in turns with llama.cpp."""
    from paceline.bench.decode.measure import DecodeOptions, measure_decode
    from paceline.bench.decode.view import decode_result
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress

    report = Report(json_file, html)
    options = DecodeOptions(
        model, tokens, prompt_tokens, prefill, rounds, threads, quantization, peer, peer_python
    )
    with progress(rounds) as on_turn:
        contest = measure_decode(options, on_turn)
    report.show(decode_result(contest))
