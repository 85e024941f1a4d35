"""`paceline models list|pull|show`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.models.checkpoint import Checkpoint
from paceline.models.needs import backend_needs
from paceline.models.registry import (
    ALIASES,
    DEFAULT_MODEL,
    is_pulled,
    load_with_tokenizer,
    pull,
    resolve,
)
from paceline.models.tokenizer import Tokenizer

app = typer.Typer(help="List, download and inspect models.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """List the aliases, and whether each is on this machine."""
    rows: list[dict[str, object]] = [
        {"alias": name, "model": alias.description, "bytes": alias.size, "fetched": is_pulled(name)}
        for name, alias in ALIASES.items()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("alias", "model", "size", "fetched")
    for row in rows:
        name = str(row["alias"]) + (" (default)" if row["alias"] == DEFAULT_MODEL else "")
        size = f"{ALIASES[str(row['alias'])].size / 1e6:,.0f} MB"
        table.add_row(name, str(row["model"]), size, "yes" if row["fetched"] else "no")
    Console().print(table)


@app.command("pull")
def pull_command(alias: Annotated[str, typer.Argument(help="Alias of the model.")] = DEFAULT_MODEL) -> None:
    """Download a model, or repair it, and print its path."""
    typer.echo(pull(alias))


@app.command("show")
def show_command(
    model: Annotated[
        str, typer.Argument(help="An alias, a .gguf file, a folder or a hub id.")
    ] = DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """Show what a model is, what its files hold, and what each backend needs to run it."""
    path = resolve(model)
    checkpoint, tokenizer = load_with_tokenizer(path)
    facts: dict[str, dict[str, object]] = {
        "config": dataclasses.asdict(checkpoint.config),
        "tensors": _tensor_facts(checkpoint),
        "weights_in_memory": backend_needs(checkpoint),
        "tokenizer": _tokenizer_facts(tokenizer),
    }
    if as_json:
        typer.echo(json.dumps({"model": model, "path": str(path), **facts}, indent=2, default=sorted))
        return
    typer.echo(path)
    for title, group in facts.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in group.items():
            table.add_row(name, _short(value))
        Console().print(table)


def _tensor_facts(checkpoint: Checkpoint) -> dict[str, object]:
    """The number of tensors and bytes per kind, and the totals."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    parameters = 0
    for tensor in checkpoint.tensors.values():
        counts[tensor.stored.kind] += 1
        sizes[tensor.stored.kind] += tensor.stored.nbytes
        parameters += math.prod(tensor.shape)
    kinds: dict[str, object] = {
        kind: {"tensors": counts[kind], "bytes": sizes[kind]} for kind in sorted(counts)
    }
    if checkpoint.quantization:
        kinds["quantization"] = checkpoint.quantization
    return {**kinds, "total": {"tensors": counts.total(), "bytes": sizes.total()}, "parameters": parameters}


def _tokenizer_facts(tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_ids": sorted(tokenizer.eos_ids),
        "chat_template": tokenizer.chat_template is not None,
    }


def _short(value: object) -> str:
    """A value as the text of a table cell; of a long collection only its length."""
    if isinstance(value, tuple | frozenset) and len(value) > 8:
        return f"{len(value)} entries"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(entry)}" for key, entry in value.items())
    return f"{value:,}" if type(value) is int else str(value)
