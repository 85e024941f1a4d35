"""Assistants of Gemma 4: a few layers that have queries only, and read the target's keys and values.

    first step      reads the target's last state of token t (normed) and token t + 1; guesses token t + 2
    later steps     read their own last state, projected to the target's width, and the guess before

All steps of a draft have the position of the last known token and see the tokens before it, never each
other: an assistant has no KV cache. Its layers are those of a small Gemma 4; besides them (H, Ht: hidden
sizes of assistant and target):

    pre_projection.weight                  [H, 2 Ht]     of the target's scaled embedding and of the state
    post_projection.weight                 [Ht, H]       to the state that the next step reads
    masked_embedding.centroids.weight      [clusters, H] with ordered embeddings: only tokens of the clusters
    masked_embedding.token_ordering        [vocabulary]  with the best scores are scored; ids by cluster
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.core.arrays import Int64Array
from paceline.errors import CheckpointError, HeadMismatchError, UnsupportedModelError
from paceline.models.checkpoint import Tensor
from paceline.models.config import ModelConfig
from paceline.models.families.config_reader import is_assistant, model_config
from paceline.models.families.fields import Fields
from paceline.models.families.table import FAMILIES
from paceline.models.files.file_layouts import converted
from paceline.models.files.layout import select_tensors
from paceline.models.files.mapped import damaged, read_json
from paceline.models.files.safetensors_files import INTEGER_KINDS, SafeTensor, read_folder
from paceline.models.gguf.checkpoint import (
    architecture_of,
    draft_method,
    layers_values,
    metadata_fields,
    renamed,
)
from paceline.models.gguf.draft_heads import DRAFT_HEADS
from paceline.models.gguf.reader import GgufFile, read_gguf

PRE, POST = "pre_projection.weight", "post_projection.weight"
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


@dataclass(frozen=True, eq=False)
class Clusters:
    """Tokens in clusters; only the tokens of the best clusters are scored."""

    tokens: Int64Array  # [clusters, tokens of a cluster] ids
    chosen: int  # the number of clusters that are scored


@dataclass(frozen=True)
class AssistantCheckpoint:
    """An assistant ready to be given to a runner."""

    config: ModelConfig  # of its layers; those of the target that they read are known beside it only
    target_hidden_size: int
    tensors: Mapping[str, Tensor]
    clusters: Clusters | None  # None: all tokens are scored
    source: Path

    def beside(self, target: ModelConfig) -> ModelConfig:
        """The config with the layers of the target's KV pool: the last with a window, the last without.

        HeadMismatchError if the target is not one that it can draft for.
        """
        sizes = (self.config.vocab_size, self.target_hidden_size)
        if sizes != (target.vocab_size, target.hidden_size):
            raise HeadMismatchError(
                f"the assistant {self.source} is for a target with {sizes[0]} tokens and hidden size "
                f"{sizes[1]}, but this one has {target.vocab_size} and {target.hidden_size}. Use the "
                "assistant that was published with it."
            )
        last = {target.window(layer) is None: index for index, layer in enumerate(target.kv_layers)}
        shapes = []
        for layer, shape in enumerate(self.config.layer_shapes):
            source = last.get(self.config.window(layer) is None)
            read = None if source is None else target.shape_of(target.kv_layers[source])
            if read is None or (read.head_dim, read.num_kv_heads) != (shape.head_dim, shape.num_kv_heads):
                raise HeadMismatchError(
                    f"the assistant {self.source} reads {shape.num_kv_heads} KV heads of {shape.head_dim} "
                    f"in layer {layer}, which this {target.family} model does not have. Use the assistant "
                    "that was published with it."
                )
            shapes.append(replace(shape, shared_with=source))
        return replace(self.config, layer_shapes=tuple(shapes))


def load_assistant(path: Path) -> AssistantCheckpoint:
    """The assistant in a folder of safetensors or a GGUF file, its config and tensors checked."""
    if path.suffix == ".gguf":
        return _from_gguf(read_gguf(path))
    folder = path if path.is_dir() else path.parent
    values, source = read_json(folder / "config.json"), f"{folder.name}/config.json"
    if not is_assistant(values):
        raise _no_assistant(folder, f"model_type is {values.get('model_type')!r}")
    fields = Fields(values, source)
    config = _config(fields)
    layout = FAMILIES[config.family].files
    stored = read_folder(folder, layout, integers=True)
    target_hidden = fields.integer("backbone_hidden_size")
    expected = _own_shapes(config, target_hidden)
    clusters = None
    if fields.flag("use_ordered_embeddings", False):
        number = fields.integer("num_centroids", 2048, most=config.vocab_size)
        chosen = fields.integer("centroid_intermediate_top_k", 32, most=number)
        clusters = Clusters(_clusters(stored.pop(ORDERING, None), config.vocab_size, number, folder), chosen)
        expected[CENTROIDS] = (number, config.hidden_size)
    found = dict[str, Tensor](stored)
    own = _taken(found, expected, folder)
    tensors = select_tensors(config, dict(converted(found, layout, config)), folder)
    return AssistantCheckpoint(config, target_hidden, {**tensors, **own}, clusters, folder)


def _from_gguf(file: GgufFile) -> AssistantCheckpoint:
    """The assistant in a file of llama.cpp's format, which scores all tokens, without clusters."""
    if draft_method(file) != "assistant":
        raise _no_assistant(file.path, f"architecture is {architecture_of(file)!r}")
    known, path = DRAFT_HEADS[architecture_of(file)], file.path
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise damaged(path, "the tensor token_embd.weight is missing")
    config = _config(Fields({"text_config": layers_values(file, known, embedding.shape[0])}, path.name))
    target_hidden = metadata_fields(file).integer("embedding_length_out")
    found = dict(renamed(file, known, config))
    for name in (CENTROIDS, ORDERING):  # no file says how many clusters are to be chosen
        found.pop(name, None)
    own = _taken(found, _own_shapes(config, target_hidden), path)
    tensors = select_tensors(config, found, path)
    return AssistantCheckpoint(config, target_hidden, {**tensors, **own}, None, path)


def _no_assistant(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no assistant of Gemma 4: its {found}. Give the folder or file of an assistant, or name "
        "the method that it is for."
    )


def _own_shapes(config: ModelConfig, target_hidden: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors beside those of the layers."""
    return {PRE: (config.hidden_size, 2 * target_hidden), POST: (target_hidden, config.hidden_size)}


def _taken(
    found: dict[str, Tensor], expected: Mapping[str, tuple[int, ...]], path: Path
) -> dict[str, Tensor]:
    """The tensors of these shapes, taken out of `found`. CheckpointError if one is not there."""
    own = {name: found.pop(name) for name in expected if name in found}
    for name, shape in expected.items():
        if name not in own or own[name].shape != shape or own[name].kind in INTEGER_KINDS:
            raise damaged(path, f"the tensor {name} is not there, or is not of floats of shape {list(shape)}")
    return own


def _config(fields: Fields) -> ModelConfig:
    """The layers of an assistant: those of a Gemma 4, without keys and values."""
    text = fields.group("text_config").values
    if not text:
        raise CheckpointError(f"{fields.source} lacks text_config. The file is damaged: fetch it again.")
    plain = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True}
    if text.get("enable_moe_block") or text.get("hidden_size_per_layer_input"):
        raise UnsupportedModelError(
            f"{fields.source}: an assistant with experts or per-layer embeddings is not supported."
        )
    config = model_config({**text, **plain}, fields.source)
    shapes = tuple(replace(shape, shared_with=0, values_are_keys=False) for shape in config.layer_shapes)
    return replace(config, layer_shapes=shapes)


def _clusters(ordering: SafeTensor | None, vocab_size: int, number: int, folder: Path) -> Int64Array:
    """The ids of the tokens of each cluster: [clusters, tokens of a cluster]."""
    if ordering is None or ordering.kind not in INTEGER_KINDS or vocab_size % number:
        raise damaged(folder, f"{ORDERING} is not there, or {vocab_size} tokens are not {number} clusters")
    ids = ordering.integers().reshape(-1)
    if not np.array_equal(np.sort(ids), np.arange(vocab_size)):
        raise damaged(folder, f"{ORDERING} does not name each of {vocab_size} tokens once")
    return ids.reshape(number, -1)
