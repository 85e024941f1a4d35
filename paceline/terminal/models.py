"""`paceline models list|pull|show`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from paceline.config import ROWS_PER_PASS, USUAL_ROWS_PER_PASS
from paceline.errors import PacelineError
from paceline.kv.sizing import PageBytes
from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.config import ModelConfig
from paceline.models.files.hub import SHORT_NAMES
from paceline.models.gguf.checkpoint import draft_method
from paceline.models.gguf.reader import read_gguf
from paceline.models.heads.assistant import load_assistant
from paceline.models.heads.checkpoint import load_head
from paceline.models.heads.fingerprint import target_fingerprint
from paceline.models.heads.mtp import LAYOUTS
from paceline.models.heads.registry import METHODS
from paceline.models.heads.shipped import shipped_head
from paceline.models.needs import (
    CACHED_BYTES,
    Need,
    cached_values,
    model_needs,
    state_bytes,
    window_values,
)
from paceline.models.registry import (
    ALIASES,
    DEFAULT_MODEL,
    is_pulled,
    load_checkpoint,
    load_tokenizer,
    pull,
    resolve,
)
from paceline.terminal.help import App

app = App(help="List, download and inspect models.", no_args_is_help=True)

PAGE_SIZE = 16  # tokens, on every backend
MAX_ENTRIES = 8  # of a collection that are shown
USUAL_CONTEXT = 4096  # tokens of a request, unless the user says or the model has fewer
# names of facts where the words of a field's own name would be unclear; --json has the fields' names
LABELS = {
    "num_layers": "layers",
    "num_heads": "attention heads",
    "num_kv_heads": "KV heads",
    "head_dim": "head size",
    "intermediate_size": "MLP size",
    "rms_norm_eps": "norm epsilon",
    "rope": "RoPE",
    "max_position": "context length",
    "tie_embeddings": "tied embeddings",
    "qkv_bias": "QKV bias",
    "qk_norm": "QK norm",
    "joint_qk_norm": "joint QK norm",
    "moe": "mixture of experts",
    "latent": "latent attention (MLA)",
    "vocab_size": "vocabulary size",
    "kv_values_per_token": "KV values per token",
    "bos_id": "BOS token",
    "eos_ids": "EOS tokens",
}
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """List the aliases, whether each is on this machine, and the short names of models of the hub."""
    rows: list[dict[str, object]] = [
        {"alias": name, "model": alias.description, "bytes": alias.size, "fetched": is_pulled(name)}
        for name, alias in ALIASES.items()
    ]
    if as_json:
        on_hub = [
            {"alias": name, "model": repository, "hub": True} for name, repository in SHORT_NAMES.items()
        ]
        typer.echo(json.dumps([*rows, *on_hub], indent=2))
        return
    # a name that is cut off cannot be copied: fold it
    table = Table("alias", Column("model", overflow="fold"), "size", "fetched")
    for row in rows:
        name = str(row["alias"]) + (" (default)" if row["alias"] == DEFAULT_MODEL else "")
        size = f"{ALIASES[str(row['alias'])].size / 1e6:,.0f} MB"
        table.add_row(name, str(row["model"]), size, "yes" if row["fetched"] else "no")
    for name, repository in SHORT_NAMES.items():
        table.add_row(name, repository, "hub", "")
    Console().print(table)


@app.command("pull")
def pull_command(
    model: Annotated[str, typer.Argument(help="An alias, a hub id or a short name.")] = DEFAULT_MODEL,
) -> None:
    """Download a model, or repair it, and print its path."""
    typer.echo(pull(model) if model in ALIASES else resolve(model))


@app.command("show")
def show_command(
    model: Annotated[
        str, typer.Argument(help="An alias, a .gguf file, a folder or a hub id.")
    ] = DEFAULT_MODEL,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a request, for the memory needed. Default: at most 4096."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests at once, for the memory needed.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show what a model is, what its files hold, what it needs, and what would run it and draft for it.

    Of a draft head in a GGUF file: what it is, and the --draft that names it.
    """
    path = resolve(model)
    if path.suffix == ".gguf" and (method := draft_method(read_gguf(path))):
        _show_head(model, path, method, as_json)
        return
    checkpoint = load_checkpoint(path)
    config = checkpoint.config
    context = max_model_len or min(config.max_position, USUAL_CONTEXT)
    needs = model_needs(checkpoint, context, max_num_seqs, _window_tokens(config, max_num_seqs))
    facts: dict[str, dict[str, object]] = {
        "config": dataclasses.asdict(config),
        "tensors": _tensor_facts(checkpoint.tensors, checkpoint.quantization),
        "cache": {
            "context": context,
            "requests": max_num_seqs,
            "kv_values_per_token": cached_values(config),
            "window_values_per_token": window_values(config),
            "window_group": config.window_group,
            "state_bytes_per_request": state_bytes(config),
        },
        "drafters": dict(_possible_drafters(checkpoint)),
        "tokenizer": _tokenizer_facts(path),
    }
    if as_json:
        runs = [{**dataclasses.asdict(need), "total_bytes": need.total_bytes} for need in needs]
        shown = {"model": model, "path": str(path), **facts, "runs": runs}
        typer.echo(json.dumps(shown, indent=2, default=sorted))
        return
    typer.echo(path)
    facts["config"] = _changed(config)
    facts["cache"] = {name: value for name, value in facts["cache"].items() if value}
    _print_tables(facts)
    Console().print(_runs_table(needs, f"memory for {max_num_seqs} x {context:,} tokens, by --quantization"))
    for backend, why in {need.backend: need.refused for need in needs if need.refused}.items():
        typer.echo(f"{backend} refuses this {config.family} model: {why}.")


def _show_head(model: str, path: Path, method: str, as_json: bool) -> None:
    """Show what the draft head in a GGUF file is, and what drafts with it."""
    head = load_assistant(path) if method == "assistant" else load_head(path)
    facts: dict[str, dict[str, object]] = {
        "config": dataclasses.asdict(head.config),
        "tensors": _tensor_facts(head.tensors),
    }
    if as_json:
        shown = {"model": model, "path": str(path), "draft_head": method, **facts}
        typer.echo(json.dumps(shown, indent=2, default=sorted))
        return
    typer.echo(path)
    facts["config"] = _changed(head.config)
    _print_tables(facts)
    typer.echo(f"A draft head: serve the model that it drafts for, with --draft {method}:{path}.")


def _print_tables(facts: Mapping[str, Mapping[str, object]]) -> None:
    """A table for each group of facts."""
    for title, group in facts.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in group.items():  # drafters are named as --draft takes them
            label = name if title in ("tensors", "drafters") else _label(name)
            table.add_row(label, Text(_short(value)))  # as it is: rich takes brackets for markup
        Console().print(table)


def _window_tokens(config: ModelConfig, requests: int) -> dict[str, int]:
    """By backend, the most tokens that layers of the window group keep, if the model has one."""
    if config.window_group is None:
        return {}
    group = 0, 0, config.window_group, PAGE_SIZE, requests
    rows = {backend: ROWS_PER_PASS.get(backend, USUAL_ROWS_PER_PASS) for backend in CACHED_BYTES}
    return {backend: PAGE_SIZE * PageBytes.of(*group, own).most_windows for backend, own in rows.items()}


def _runs_table(needs: list[Need], title: str) -> Table:
    """Gigabytes by backend and quantization."""
    names = list(dict.fromkeys(need.quantization for need in needs))
    table = Table("backend", *names, title=title, title_justify="left")
    for backend in dict.fromkeys(need.backend for need in needs):
        own = {need.quantization: need for need in needs if need.backend == backend}
        cells = [_gigabytes(own[name]) if name in own else "-" for name in names]
        table.add_row(backend, *cells)
    return table


def _gigabytes(need: Need) -> str:
    return "refused" if need.refused else f"{need.total_bytes / 1e9:.3g} GB"


def _tensor_facts(tensors: Mapping[str, Tensor], quantization: str = "") -> dict[str, object]:
    """The number of tensors and bytes per kind, and the totals."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    parameters = 0
    for tensor in tensors.values():
        counts[tensor.stored.kind] += 1
        sizes[tensor.stored.kind] += tensor.stored.nbytes
        parameters += math.prod(tensor.shape)
    kinds: dict[str, object] = {
        kind: {"tensors": counts[kind], "bytes": sizes[kind]} for kind in sorted(counts)
    }
    if quantization:
        kinds["quantization"] = quantization
    return {**kinds, "total": {"tensors": counts.total(), "bytes": sizes.total()}, "parameters": parameters}


def _tokenizer_facts(path: Path) -> dict[str, object]:
    try:
        tokenizer = load_tokenizer(path)
    except PacelineError as error:  # the rest is still worth showing
        return {"refused": str(error)}
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_ids": sorted(tokenizer.eos_ids),
        "chat_template": tokenizer.chat_template is not None,
    }


def _changed(record: Any) -> dict[str, object]:
    """The fields of a dataclass that differ from their defaults, and so on within them."""
    changed: dict[str, object] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.default_factory is not dataclasses.MISSING:
            default: object = field.default_factory()
        else:
            default = field.default
        if value != default:
            changed[field.name] = _shown(value)
    return changed


def _shown(value: Any) -> Any:
    """A field's value with the records in it as what `_changed` leaves of them."""
    if isinstance(value, tuple):
        return tuple(map(_shown, value))
    return _changed(value) if dataclasses.is_dataclass(value) else value


def _label(name: str) -> str:
    """The words for a field."""
    return LABELS.get(name, name.replace("_", " "))


def _short(value: object) -> str:
    """A value as the text of a table cell; of a long collection only its length."""
    match value:
        case list() | tuple() | frozenset():
            many = len(value) > MAX_ENTRIES
            return f"{len(value)} entries" if many else f"[{', '.join(map(_short, value))}]"
        case dict():
            return ", ".join(f"{_label(key)} {_short(entry)}" for key, entry in value.items()) or "default"
        case None | True | False:
            return {None: "none", True: "yes", False: "no"}[value]
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if value.is_integer() else f"{value:g}"
    return str(value)


def _possible_mtp(checkpoint: Checkpoint) -> str:
    if not checkpoint.mtp:
        return "refused: the files have no block for multi-token prediction"
    family = checkpoint.config.family
    return "yes" if family in LAYOUTS else f"refused: the block of {family} models is not supported"


def _possible_drafters(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Each method, and whether it can draft for the model, or why not."""
    yield from (("ngram", "yes"), ("suffix", "yes"))
    yield "draft_model", "yes, with a smaller model, of the same vocabulary or another"
    is_recurrent = checkpoint.config.recurrent is not None
    why = "recurrent layers cannot take back the states of a rejected draft"
    yield "layerskip", f"refused: {why}" if is_recurrent else "yes"
    yield "mtp", _possible_mtp(checkpoint)
    has_assistants = checkpoint.config.family.startswith("gemma4")
    yield "assistant", "yes, with its assistant" if has_assistants else "refused: only Gemma 4 has assistants"
    fingerprint = target_fingerprint(checkpoint)
    for method in METHODS:
        head = "the shipped head" if shipped_head(method, fingerprint) else "a head trained for this model"
        yield method, f"yes, with {head}"
