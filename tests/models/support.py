"""What runs where: every family on every backend, tried with tiny checkpoints.

`python -m tests.models.support` tries all of it and writes the tables of docs/guides/models.md; with names
of families, only their lines. `make test-large` compares. Plain decoding, chains and trees must give the same
tokens, and a GGUF file those of the model that it was written from. A second table says who drafts for them
(drafter_support.py), a third in how many bits backends keep the matrices of quantized safetensors.

The column of `cuda` is tried where there is a GPU: `python -m tests.models.support cuda` tries only that, and
says what the guide has otherwise.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import torch

from paceline.backends.base import Backend
from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.trees import DraftPlan
from paceline.engine.admission import Limits
from paceline.kv.window_pages import window_pages_for
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.needs import block_kind, missing_blocks
from paceline.models.registry import load_checkpoint
from tests import tiny, tiny_families
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engines import new_engine
from tests.models.drafter_support import drafter_table
from tests.models.gguf_support import gguf_pairs
from tests.models.quantized import files as quantized_files
from tests.tiny_near_families import NEAR_FAMILIES
from tests.toy_drafter import ScriptedDrafter

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "models.md"
BEGIN, END = "<!-- what runs where: written by a test -->", "<!-- end -->"
BEGIN_FILES = "<!-- quantized files: written by a test -->"
BEGIN_DRAFTERS = "<!-- who drafts for it: written by a test -->"
HEADINGS = ("`model_type`", "`torch`", "`cpu`", "`cuda`", "GGUF")
NOT_TRIED = "not tried"
TWINS = {"mimo": "qwen2", "kimi_k2": "deepseek-v3"}  # of which transformers has no classes
ROWS = 64
MAX_LEN = 160
SPARE_PAGES = 4  # window pages besides those that a request needs: several run at a time


def table(families: Iterable[str] = FAMILIES) -> list[str]:
    """The lines of the table, one for each family."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}"]
    for family in families:
        cells = [_cell(family, backend) for backend in ("torch", "cpu")]
        cells = [f"`{family}`", *cells, _on_cuda(family), gguf_cell(family)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def quantized_table() -> list[str]:
    """How backends keep the matrices of each kind of quantized safetensors."""
    kept = {"Q4_0": "4 bits, as stored", "Q8_0": "8 bits, as stored", "FP8": "FP8, as stored"}
    kept |= {
        "FP8 in blocks": "FP8, as stored",
        "Q4_1": "4 bits, the product of zero point and scale in 16 bits",
    }
    lines = ["| file | `cpu` (auto) | `cuda`, `--quantization native` |", "| --- | --- | --- |"]
    for name, (config, pack) in quantized_files.FORMATS.items():
        folder = Path(tempfile.mkdtemp())
        quantized_files.write(folder, config, pack)
        # the only matrix that is deeper than a block of 128
        tensor = load_checkpoint(folder).tensors["model.layers.0.mlp.down_proj.weight"]
        on_cuda = kept.get(block_kind(tensor), "rounded to int8")
        on_cpu = kept.get(tensor.kind, "rounded to int8")
        lines.append(f"| {name}: {quantized_files.WORDS[name]} | {on_cpu} | {on_cuda} |")
    return lines


def written_table(guide: str, begin: str = BEGIN) -> list[str]:
    """The lines of a table in the guide."""
    return guide.split(begin)[1].split(END)[0].strip().splitlines()


def _with_table(guide: str, begin: str, lines: list[str]) -> str:
    before, rest = guide.split(begin)
    _, after = rest.split(END, 1)
    return before + begin + "\n" + "\n".join(lines) + "\n" + END + after


def _merged(guide: str, begin: str, lines: list[str]) -> str:
    """The guide with these lines of a table; families without one keep theirs."""
    known = {line.split("`")[1]: line for line in [*written_table(guide, begin)[2:], *lines[2:]]}
    return _with_table(guide, begin, lines[:2] + [known[family] for family in FAMILIES if family in known])


def checkpoints(family: str) -> list[Checkpoint]:
    """All tiny checkpoints of a family that the installed transformers can make."""
    kinds = _model_types().items()
    return [_checkpoint(name, family) for name, kind in kinds if family == kind or TWINS.get(family) == name]


@cache
def _model_types() -> dict[str, str]:
    """The model_type of every tiny checkpoint."""
    import transformers

    known = tiny_families.FAMILIES | tiny_families.TORCH_FAMILIES
    known |= tiny_families.MORE_FAMILIES | tiny_families.MORE_HYBRIDS | NEAR_FAMILIES
    classes = {name: getattr(transformers, own.kind, None) for name, own in known.items()}
    return {name: own.model_type for name, own in classes.items() if own is not None}


@cache
def _checkpoint(name: str, family: str) -> Checkpoint:
    folder = tiny.save_checkpoint(name, Path(tempfile.mkdtemp()))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": family}))
    return load_checkpoint(folder)


def _cell(family: str, backend: str) -> str:
    results = {_try(checkpoint, backend) for checkpoint in checkpoints(family)}
    return " / ".join(sorted(results)) or NOT_TRIED


def _try(checkpoint: Checkpoint, backend: str) -> str:
    """`yes` if plain decoding, chains and trees give the same tokens; or why the model is refused.

    Chains and trees are in few window pages, if the model has a window group.
    """
    if refused := _refused(checkpoint, backend):
        return refused
    loaded, config = _loaded(checkpoint, backend), checkpoint.config
    plain = _tokens(loaded, config)
    truth = dict(zip(_prompts(config.vocab_size), plain, strict=True))
    drafted = [_tokens(loaded, config, ScriptedDrafter(truth, style)) for style in ("partly", "tree")]
    return "yes" if drafted == [plain, plain] else "**other tokens**"


def _refused(checkpoint: Checkpoint, backend: str) -> str:
    blocks = missing_blocks(checkpoint.config, backend)
    return f"no: {', '.join(blocks)}" if blocks else ""


def _on_cuda(family: str) -> str:
    """The same on a GPU; where there is none, whether it has kernels."""
    if torch.cuda.is_available():
        return _cell(family, "cuda")
    results = {_refused(checkpoint, "cuda") or "yes" for checkpoint in checkpoints(family)}
    return " / ".join(sorted(results)) or NOT_TRIED


def gguf_cell(family: str) -> str:
    """`yes` if its GGUF files give the tokens of what they were written from, on `torch` and `cpu`."""
    results = set()
    for file, model in gguf_pairs(family):
        assert file.config.family == family
        for backend in ("torch", "cpu"):
            found, expected = (_tokens(_loaded(own, backend, "none"), own.config) for own in (file, model))
            results.add("yes" if found == expected else f"**other tokens on {backend}**")
    return " / ".join(sorted(results)) or "no"


def _loaded(checkpoint: Checkpoint, backend: str, quantization: str = "auto") -> Backend:
    return load_backend(
        checkpoint, BackendOptions(backend=backend, threads=1, quantization=quantization), ROWS
    )


def try_cuda(families: list[str]) -> None:
    """Print the cells of `cuda`, as soon as each is tried, and whether the guide has them so."""
    written = {line.split("`")[1]: line.split(" | ")[3] for line in written_table(GUIDE.read_text())[2:]}
    for family in families:
        cell = _cell(family, "cuda")
        print(family, cell, "" if cell == written[family] else "(not as in the guide)", flush=True)


def _prompts(vocab_size: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(0)
    return [tuple(random.integers(2, vocab_size, length).tolist()) for length in (5, 17, 40)]


def _tokens(backend: Backend, config: ModelConfig, drafter: object = None) -> list[list[int]]:
    """The output tokens of the prompts, greedy and sampled."""
    name, group, few = "scripted", backend.window_group, None
    if drafter is not None and group is not None:
        few = window_pages_for(group, ROWS, backend.page_size) + 1 + SPARE_PAGES
    engine = new_engine(
        backend,
        Tokenizer(),
        Limits(config.vocab_size, min(MAX_LEN, config.max_position), 4, ROWS),
        num_pages=64,
        num_window_pages=few,
        controller=FixedController(DraftPlan(name, 5, branching=2)) if drafter else None,
        drafters={name: drafter} if drafter else {},  # type: ignore[dict-item]
    )
    temperatures = (0.0, 0.8, 1.0)
    requests = [
        engine.add_request(
            list(prompt), SamplingParams(temperature=temperature, seed=7, max_tokens=12, ignore_eos=True)
        )[0]
        for prompt, temperature in zip(_prompts(config.vocab_size), temperatures, strict=True)
    ]
    while engine.has_unfinished:
        engine.step()
    assert all(request.error is None for request in requests), [request.error for request in requests]
    return [request.output_token_ids for request in requests]


if __name__ == "__main__":
    if sys.argv[1:2] == ["cuda"]:
        try_cuda(sys.argv[2:] or list(FAMILIES))
        sys.exit()
    tried = sys.argv[1:] or list(FAMILIES)
    written = _with_table(GUIDE.read_text(), BEGIN_FILES, quantized_table())
    written = _merged(written, BEGIN_DRAFTERS, drafter_table({own: checkpoints(own) for own in tried}))
    GUIDE.write_text(_merged(written, BEGIN, table(tried)))
    print("\n".join(written_table(GUIDE.read_text())))
