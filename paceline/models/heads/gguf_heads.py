"""Draft heads in GGUF files, in llama.cpp's format: EAGLE-3 of one layer, DFlash and DSpark.

All of them number the hidden states in `target_layers` by the layer that reads them: i is the hidden state i,
where `target_layer_ids` of a config.json is one lower. d2t has the target's ids, where safetensors have
differences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.core.arrays import Int64Array
from paceline.errors import CheckpointError
from paceline.models.checkpoint import Tensor
from paceline.models.config import ModelConfig
from paceline.models.families.fields import Fields
from paceline.models.files.mapped import damaged
from paceline.models.files.safetensors_writer import encode
from paceline.models.gguf.architectures import Architecture
from paceline.models.gguf.blocks import INTEGERS
from paceline.models.gguf.checkpoint import (
    architecture_of,
    draft_method,
    layers_config,
    metadata_fields,
    renamed,
)
from paceline.models.gguf.draft_heads import DRAFT_HEADS
from paceline.models.gguf.reader import GgufFile, GgufTensor, read_gguf
from paceline.models.heads.block_formats import KINDS, block_tensor_name
from paceline.models.heads.config import BlockAttention, BlockConfig, HeadConfig
from paceline.models.heads.formats import our_name

USUAL_BLOCK = 16  # slots, of a file that does not tell it
MASK_TOKEN, TOKENS = "tokenizer.ggml.mask_token_id", "tokenizer.ggml.tokens"
MARKOV = "markov_head.markov_w1.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


def read_gguf_head(path: Path) -> tuple[HeadConfig, dict[str, Tensor], Int64Array | None]:
    """The config of the head in a GGUF file, its tensors under the names of config.py, and its draft ids."""
    file = read_gguf(path)
    method = draft_method(file)
    if method not in ("eagle3", *KINDS):
        raise CheckpointError(
            f"{path.name} has the architecture {architecture_of(file)!r}, which is no draft head that reads "
            f"hidden states. Give another file, or this one as --draft {method or 'model'}:{path}."
        )
    fields, known = metadata_fields(file), DRAFT_HEADS[architecture_of(file)]
    layers = layers_config(file, known, _vocab_size(file, fields))
    is_block = method in KINDS
    tensors = dict(_tensors(file, known, layers, is_block))
    lm_head = tensors.get("lm_head.weight")
    config = HeadConfig.beside(
        layers,
        method,
        draft_vocab_size=layers.vocab_size if lm_head is None else lm_head.shape[0],
        feature_layers=_feature_layers(fields),
        own_embedding="embed_tokens.weight" in tensors,
        own_lm_head=lm_head is not None,
    )
    config = _with_block(config, layers, file, tensors) if is_block else _with_flags(config, layers, fields)
    return config, tensors, _draft_ids(file)


def _tensors(
    file: GgufFile, known: Architecture, layers: ModelConfig, is_block: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the names of config.py."""
    rename = block_tensor_name if is_block else our_name
    for name, tensor in renamed(file, known, layers):
        if name == CONFIDENCE and isinstance(tensor, GgufTensor) and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))  # quantizers of files drop axes of 1
        if name != "d2t":
            yield rename(name), tensor
    if "conf_proj.weight" in file.tensors and "conf_proj.bias" not in file.tensors:
        yield CONFIDENCE_BIAS, encode(np.zeros(1, dtype=np.float32))


def _with_flags(config: HeadConfig, layers: ModelConfig, fields: Fields) -> HeadConfig:
    """The config of an EAGLE-3 head."""
    if layers.num_layers != 1:
        raise fields.wrong("block_count", "1, the layers of an EAGLE-3 head")
    return replace(
        config,
        target_hidden_size=fields.integer("target_hidden_size"),
        norm_before_fc=fields.flag("norm_before_fc", False),
        norm_before_residual=fields.flag("norm_before_residual", False),
    )


def _with_block(
    config: HeadConfig, layers: ModelConfig, file: GgufFile, tensors: dict[str, Tensor]
) -> HeadConfig:
    """The config of a parallel head. Its slots see the whole block: the format has no causal heads."""
    fields, top, is_dspark = metadata_fields(file), Fields(file.metadata, file.path.name), MARKOV in tensors
    mask = top.integer(MASK_TOKEN, least=0)
    if mask >= config.vocab_size:
        raise top.wrong(MASK_TOKEN, f"a token below {config.vocab_size}")
    block = BlockConfig(
        size=fields.integer("block_size", USUAL_BLOCK, least=1 if is_dspark else 2),
        mask_token_id=mask,
        layers=tuple(BlockAttention(layers.window(layer)) for layer in range(layers.num_layers)),
        sample_from_anchor=is_dspark and fields.flag("sample_from_anchor", True),
        markov_rank=tensors[MARKOV].shape[-1] if is_dspark else 0,
        confidence=CONFIDENCE in tensors,
        confidence_with_markov=CONFIDENCE in tensors,
    )
    return replace(config, qk_norm="layers.0.self_attn.q_norm.weight" in tensors, block=block)


def _vocab_size(file: GgufFile, fields: Fields) -> int:
    """The number of the target's tokens, whose tokenizer the file has."""
    tokens = file.metadata.get(TOKENS)
    return fields.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None)


def _feature_layers(fields: Fields) -> tuple[int, ...]:
    """The hidden states that the head reads, as in Hugging Face: 0 is the embedding."""
    found = fields.values.get("target_layers")
    if not isinstance(found, np.ndarray) or not len(found) or found.dtype.kind not in "iu":
        raise fields.wrong("target_layers", "a list of layer numbers")
    return tuple(found.tolist())


def _draft_ids(file: GgufFile) -> Int64Array | None:
    """The target's id of each draft id; None: the same ids."""
    ids = file.tensors.get("d2t")
    if ids is not None and (ids.kind not in INTEGERS or len(ids.shape) != 1):
        raise damaged(file.path, f"d2t is {ids.kind} of shape {list(ids.shape)}, not a list of ids")
    return None if ids is None else ids.integers()
