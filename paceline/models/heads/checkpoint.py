"""HeadCheckpoint: reading learned heads from the formats of other projects, and writing them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.arrays import Int32Array, Int64Array
from paceline.errors import CheckpointError, ConfigError, ModelError
from paceline.extras import needs_extra
from paceline.models.checkpoint import Tensor
from paceline.models.files.hub import MASK_EMBEDDING
from paceline.models.files.mapped import damaged, read_json
from paceline.models.files.safetensors_files import INTEGER_KINDS, SafeTensor, read_metadata, read_safetensors
from paceline.models.files.safetensors_writer import encode, encode_flags, encode_integers, write_safetensors
from paceline.models.heads.block_formats import (
    BLOCK_FORMATS,
    block_tensor_name,
    is_block_config,
    read_block_config,
)
from paceline.models.heads.config import HeadConfig, TargetName, expected_tensors
from paceline.models.heads.formats import COPIES, FORMATS, our_name, read_config
from paceline.models.heads.gguf_heads import read_gguf_head
from paceline.models.quantized.method import read_quantization
from paceline.models.quantized.modules import dequantized
from paceline.models.quantized.writer import can_pack, pack, quantization_config

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TORCH_KINDS = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.bool": "BOOL",
}
QUANTIZATIONS = {"int4": 4, "int8": 8}  # bits
EIGHT_BITS = ("fc",)  # modules that keep them in int4: its columns differ a hundredfold, as features do
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # names in config.json
FINGERPRINT, TARGET_NAME = "paceline_target_fingerprint", "paceline_target_name"  # safetensors metadata


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head ready to be given to a runner. Its tensors have the names of config.py."""

    config: HeadConfig
    tensors: Mapping[str, Tensor]
    draft_ids: Int32Array | None  # [draft vocabulary] the target's id of each guess; None: the same ids
    source: Path


def load_head(path: Path) -> HeadCheckpoint:
    """The head in a folder, in a GGUF file, or in a file next to its config.json, in any supported format."""
    if path.suffix == ".gguf":
        config, tensors, target_ids = read_gguf_head(path)
        ids = _checked_ids(config, target_ids, None, path)
        return HeadCheckpoint(config, _selected(config, tensors, path), ids, path)
    folder = path if path.is_dir() else path.parent
    weights = path if path.is_file() else _find_weights(folder)
    values = read_json(folder / "config.json")
    is_block = is_block_config(values)
    rename, read = (block_tensor_name, read_block_config) if is_block else (our_name, read_config)
    found = {rename(name): tensor for name, tensor in read_weights(weights).items()}
    found = {name: tensor for name, tensor in found.items() if name not in COPIES}
    offsets, mask = found.pop("d2t", None), found.pop("t2d", None)
    if is_block and (folder / MASK_EMBEDDING).is_file():
        found["mask_embedding"] = _read_mask_embedding(folder / MASK_EMBEDDING)
    source = f"{folder.name}/config.json"
    quantization = read_quantization(values, source)
    tensors = dict[str, Tensor](found) if quantization is None else dequantized(found, quantization)
    config = read(values, source, {name: tensor.shape for name, tensor in tensors.items()})
    if config.kind == "eagle":  # an lm_head in its file is a copy of the target's
        tensors.pop("lm_head.weight", None)
        config = replace(config, draft_vocab_size=config.vocab_size, own_lm_head=False)
    config = replace(config, target=read_target_name(weights))
    differences = None if offsets is None else offsets.integers().reshape(-1)
    named = None if differences is None else differences + np.arange(len(differences))
    ids = _checked_ids(config, named, mask, weights)
    return HeadCheckpoint(config, _selected(config, tensors, weights), ids, path)


def write_head(
    head: HeadCheckpoint, folder: Path, form: str, target: str = "", quantization: str | None = None
) -> None:
    """Write a head into a folder in the format `form`; `target` is the hub id or path of its target.

    `quantization`: of its matrices, int4 or int8; None: 16 bits, or as they are.
    """
    if form not in FORMATS:
        raise ConfigError(f"{form!r} is no format of heads. Use one of {', '.join(FORMATS)}.")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"{quantization!r} is no quantization of heads. Use one of {', '.join(QUANTIZATIONS)}."
        )
    file_format = FORMATS[form]
    trained_for = head.config.target
    config_of = file_format.config if head.config.block is None else BLOCK_FORMATS[form]
    values = config_of(head.config, target or (trained_for.name if trained_for else ""))
    values["torch_dtype"] = DTYPES.get(head.tensors["fc.weight"].kind, "float16")
    layer = file_format.layer if head.config.kind == "eagle3" else "layers.0."
    tensors: dict[str, SafeTensor] = {}
    bits: dict[str, int] = {}
    for name, tensor in head.tensors.items():
        theirs = _their_name(name, layer)
        module = theirs.removesuffix(".weight")
        if quantization is not None and can_pack(tensor.shape):
            bits[module] = 8 if module in EIGHT_BITS else QUANTIZATIONS[quantization]
            packed = pack(tensor.float32(), bits[module])
            tensors |= {f"{module}.{part}": stored for part, stored in packed.items()}
        else:
            tensors[theirs] = tensor if isinstance(tensor, SafeTensor) else _encoded(tensor)
    if bits:
        values["quantization_config"] = quantization_config(bits)
    everything = np.arange(head.config.vocab_size)
    # vLLM refuses the list of a head with all tokens; one in another order cannot do without
    if head.draft_ids is not None and not np.array_equal(head.draft_ids, everything):
        ids = head.draft_ids.astype(np.int64)
        mask = np.zeros(head.config.vocab_size, dtype=np.bool_)
        mask[ids] = True
        tensors["d2t"] = encode_integers(ids - np.arange(len(ids)))
        tensors["t2d"] = encode_flags(mask)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS[0], tensors, target_notes(trained_for))
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _encoded(tensor: Tensor) -> SafeTensor:
    """The tensor as its file has it, or, of few bits, in 16."""
    kind = tensor.stored.kind
    return encode(tensor.float32(), kind if kind in DTYPES else "F16")


def target_notes(target: TargetName | None) -> dict[str, str]:
    """The safetensors metadata about the target of a head."""
    notes = {"format": "pt"}  # other loaders require it
    if target is not None:
        notes |= {FINGERPRINT: target.fingerprint, TARGET_NAME: target.name}
    return notes


def _their_name(name: str, layer: str) -> str:
    return layer + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _find_weights(folder: Path) -> Path:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder} has no draft head: neither {' nor '.join(WEIGHTS)} is there. "
        "Give a folder with one of them and config.json."
    )


def read_weights(path: Path) -> dict[str, SafeTensor]:
    """The tensors of a file under their names in it."""
    if path.suffix == ".safetensors":
        return read_safetensors(path, integers=True)
    content = _read_pickle(path)
    if not isinstance(content, dict):
        raise damaged(path, "it is no table of tensors")
    return {name: _torch_tensor(value, name, path) for name, value in content.items()}


def _read_mask_embedding(path: Path) -> SafeTensor:
    """The embedding of MASK, which its authors store as one tensor, perhaps with leading axes of one."""
    tensor = _torch_tensor(_read_pickle(path), "mask_embedding", path)
    return replace(tensor, shape=tensor.shape[-1:])


def _read_pickle(path: Path) -> Any:
    """The tensors that torch saved to a file; its code is never run."""
    with needs_extra("torch", f"the draft head {path}, a pickle of torch,", ModelError):
        import torch  # here, because only older heads need it

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged(path, f"it is no file of tensors ({str(error)[:200]})") from error


def _torch_tensor(value: Any, name: str, path: Path) -> SafeTensor:
    """A tensor of torch as one of a safetensors file."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise damaged(path, "it is no table of tensors")
    kind = TORCH_KINDS.get(str(value.dtype))
    if kind is None or value.ndim == 0 or value.numel() == 0:
        raise damaged(path, f"the tensor {name} is a {value.dtype} of shape {list(value.shape)}")
    data = value.detach().contiguous().view(torch.uint8).numpy()
    return SafeTensor(tuple(value.shape), kind, data.reshape(-1, data.shape[-1]))


def read_target_name(path: Path) -> TargetName | None:
    """The target that the head was trained for, if its file says so."""
    notes = read_metadata(path) if path.suffix == ".safetensors" else {}
    return TargetName(notes[FINGERPRINT], notes.get(TARGET_NAME, "")) if FINGERPRINT in notes else None


def _checked_ids(
    config: HeadConfig, ids: Int64Array | None, mask: SafeTensor | None, path: Path
) -> Int32Array | None:
    """The target's id of each draft id (d2t of a file); None: the same ids."""
    if ids is None:
        if config.draft_vocab_size != config.vocab_size:
            raise damaged(
                path, f"it guesses {config.draft_vocab_size} tokens, but d2t, which says which, is missing"
            )
        return None
    if len(ids) != config.draft_vocab_size or len(np.unique(ids)) != len(ids):
        raise damaged(path, f"d2t does not name {config.draft_vocab_size} different tokens")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise damaged(path, f"d2t names tokens outside 0..{config.vocab_size - 1}")
    if mask is not None and not np.array_equal(np.flatnonzero(mask.integers()), np.sort(ids)):
        raise damaged(path, "d2t and t2d name different tokens")
    return ids.astype(np.int32)


def _selected(config: HeadConfig, found: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors that the config requires. CheckpointError if they are not exactly these."""
    selected: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config):
        if name not in found:
            raise damaged(path, f"it lacks the tensor {name} of an {config.kind} head")
        if found[name].shape != shape or found[name].kind in INTEGER_KINDS:
            raise damaged(
                path,
                f"tensor {name} is {found[name].kind} of shape {list(found[name].shape)}, but its "
                f"configuration asks for floats of shape {list(shape)}",
            )
        selected[name] = found[name]
    if unknown := sorted(set(found) - set(selected)):
        raise CheckpointError(
            f"{path} has tensors that an {config.kind} head of this configuration does not have: "
            f"{', '.join(unknown[:5])}. This kind of head is not supported."
        )
    return selected
