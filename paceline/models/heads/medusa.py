"""Medusa heads: K small networks; each reads the target's last hidden state and guesses one position.

Head k reads the normed last hidden state of token t and guesses token t + 2 + k. It is L residual blocks
x + silu(W x + b), then a matrix to the vocabulary. Tensors have vLLM's names (H: hidden size):

    blocks.{k}.layers.{l}.weight | .bias    [H, H] | [H]
    lm_heads.{k}.weight                     [draft vocabulary, H]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from paceline.core.arrays import Float32Array, Int32Array
from paceline.errors import CheckpointError
from paceline.models.checkpoint import Tensor
from paceline.models.files.mapped import damaged, read_json
from paceline.models.files.safetensors_files import SafeTensor
from paceline.models.files.safetensors_writer import encode_integers, write_safetensors
from paceline.models.heads.checkpoint import WEIGHTS, read_target_name, read_weights, target_notes
from paceline.models.heads.config import TargetName

PATHS = "medusa_choices"  # key in config.json, by Medusa's authors
MEDUSA_FILES = (*WEIGHTS, "medusa_lm_head.safetensors", "medusa_lm_head.pt")
# Names in the files of Medusa's authors: {head}.{block}.linear.weight|bias, {head}.{number of blocks}.weight
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
LAST = re.compile(r"(\d+)\.(\d+)\.weight")


@dataclass(frozen=True)
class MedusaConfig:
    """Everything that a runner must know about Medusa heads."""

    num_heads: int
    num_layers: int  # blocks of each head
    hidden_size: int  # the target's
    draft_vocab_size: int
    target: TargetName | None = None  # None: its file does not say

    def expected_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name and shape of every tensor."""
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                yield f"blocks.{head}.layers.{layer}.weight", (self.hidden_size, self.hidden_size)
                yield f"blocks.{head}.layers.{layer}.bias", (self.hidden_size,)
            yield f"lm_heads.{head}.weight", (self.draft_vocab_size, self.hidden_size)


@dataclass(frozen=True)
class MedusaCheckpoint:
    """Loaded Medusa heads."""

    config: MedusaConfig
    tensors: Mapping[str, Tensor]
    draft_ids: Int32Array | None  # [draft vocabulary] the target's id of each guess; None: the same ids
    source: Path
    paths: tuple[tuple[int, ...], ...] = ()  # the calibrated tree, if there is one: see draft/heads/ranked.py


def load_medusa(path: Path) -> MedusaCheckpoint:
    """The Medusa heads in a folder or file, with the tensor names of Medusa's authors or of vLLM."""
    weights = path if path.is_file() else _find(path)
    found = {_our_name(name): tensor for name, tensor in read_weights(weights).items()}
    ids = found.pop("token_map", None)
    heads = sum(name.startswith("lm_heads.") for name in found)
    if not heads or "lm_heads.0.weight" not in found or len(found["lm_heads.0.weight"].shape) != 2:
        raise damaged(weights, "it has no Medusa heads")
    vocab_size, hidden_size = found["lm_heads.0.weight"].shape
    layers = sum(re.fullmatch(r"blocks\.0\.layers\.\d+\.weight", name) is not None for name in found)
    config = MedusaConfig(heads, layers, hidden_size, vocab_size, read_target_name(weights))
    expected = dict(config.expected_tensors())
    shapes = {name: tensor.shape for name, tensor in found.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise damaged(
                weights,
                f"tensor {name} has the shape {shapes.get(name)}, but {heads} Medusa heads of {layers} "
                f"blocks have {expected.get(name)}",
            )
    draft_ids = None if ids is None else ids.integers().astype(np.int32)
    if draft_ids is not None and len(draft_ids) != vocab_size:
        raise damaged(weights, f"token_map names {len(draft_ids)} tokens, but {vocab_size} are guessed")
    return MedusaCheckpoint(
        config, found, draft_ids, path, _read_paths(weights.parent / "config.json", heads)
    )


def write_medusa(head: MedusaCheckpoint, folder: Path) -> None:
    """Write Medusa heads into a folder in vLLM's format."""
    config = head.config
    values: dict[str, object] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.draft_vocab_size,
    }
    tensors = {name: cast(SafeTensor, tensor) for name, tensor in head.tensors.items()}
    if head.draft_ids is not None:
        tensors["token_map"] = encode_integers(head.draft_ids.astype(np.int64))
        values["truncated_vocab_size"] = config.draft_vocab_size
    if head.paths:
        values[PATHS] = head.paths
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS[0], tensors, target_notes(config.target))
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


class NumpyMedusa:
    """The heads in numpy: for the cpu backend, and the reference of the torch version."""

    least_chance = 0.35  # rows are expensive on the cpu backend

    def __init__(self, head: MedusaCheckpoint) -> None:
        self._config = head.config
        self._tensors = {name: tensor.float32() for name, tensor in head.tensors.items()}

    def run(self, states: Float32Array) -> Float32Array:
        """The guesses of all heads [heads, rows, draft vocabulary] for normed last states [rows, hidden]."""
        logits = []
        for head in range(self._config.num_heads):
            hidden = states
            for layer in range(self._config.num_layers):
                block = f"blocks.{head}.layers.{layer}"
                inner = hidden @ self._tensors[f"{block}.weight"].T + self._tensors[f"{block}.bias"]
                hidden = hidden + inner / (1 + np.exp(-inner))
            logits.append(hidden @ self._tensors[f"lm_heads.{head}.weight"].T)
        return np.stack(logits)


def _read_paths(config: Path, heads: int) -> tuple[tuple[int, ...], ...]:
    """The calibrated paths of a config.json; empty if it has none, or is not there."""
    if not config.is_file():
        return ()
    given: Any = read_json(config).get(PATHS) or []
    lists = isinstance(given, list) and all(isinstance(path, list) for path in given)
    paths = [tuple(path) for path in given] if lists else [()]
    seen: set[tuple[int, ...]] = {()}
    for path in paths:
        sound = 0 < len(path) <= heads and all(type(rank) is int and rank >= 0 for rank in path)
        if not sound or path in seen or path[:-1] not in seen:
            raise damaged(
                config,
                f"{PATHS} must be lists of at most {heads} ranks, each once and behind its own beginning",
            )
        seen.add(path)
    return tuple(paths)


def _our_name(name: str) -> str:
    name = name.removeprefix("medusa_head.")
    if match := BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := LAST.fullmatch(name):
        return f"lm_heads.{match[1]}.weight"
    return name


def _find(folder: Path) -> Path:
    for name in MEDUSA_FILES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} has no Medusa heads: none of {', '.join(MEDUSA_FILES)} is there.")
