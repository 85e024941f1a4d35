"""LoRA adapters: folders of peft, as pairs of small matrices that are added to a model's own.

    W x  becomes  W x + scale * B (A x)        A [rank, in], B [out, rank]

A folder has adapter_config.json and adapter_model.safetensors. Only what changes a matrix of the layers is
read; what would change anything else (biases, embeddings, routers, DoRA) is refused. B has the rows of the
file's matrix: they are split and ordered as those of the file are (file_layouts.py). Experts that are one
parameter have one A and one B for all of them, see stacked_adapters.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.core.arrays import Float32Array
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.config import ModelConfig, RecurrentConfig
from paceline.models.families.fields import Fields
from paceline.models.families.table import FAMILIES
from paceline.models.files.file_layouts import FileLayout, converted, fused_matrices, our_name
from paceline.models.files.layout import expected_tensors
from paceline.models.files.mapped import read_json
from paceline.models.files.safetensors_files import SafeTensor, read_safetensors
from paceline.models.files.stacked_adapters import STACK, checked_sides, expert_changes, wrong_shape

FILES = ("adapter_config.json", "adapter_model.safetensors")
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.(?:default\.)?weight")
MODULE = re.compile(
    r"model\.layers\.\d+\.(self_attn\.([qkvo]|qkv|gate|q_[ab]|kv_b)_proj|self_attn\.kv_a_proj_with_mqa"
    r"|conv\.(in|o)_proj|mamba\.(in|out)_proj|linear_attn\.(in_proj_(qkv|z|a|b|qkvz|ba)|out_proj)"
    r"|mlp\.((shared_experts|experts\.\d+)\.)?(gate|up|gate_up|down)_proj)"
)
# options that make an adapter something else than the sum above, and the values that do not
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": (),
    "layer_replication": (),
    "alora_invocation_tokens": (),  # it would change only what comes after them
    "use_qalora": (False,),
    "lora_bias": (False,),
    # other sums: block-diagonal matrices, a diagonal between A and B, a mixture of samples or of adapters
    "use_bdlora": (),
    "kasa_config": (),
    "monteclora_config": (),
    "arrow_config": (),
    "velora_config": (),  # the sum above, but with further tensors
    # others change the model's own matrices before the training
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class LoraMatrix:
    """What an adapter adds to one matrix."""

    down: Float32Array  # A [rank, in]
    up: Float32Array  # B [out, rank], times the scale


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model, by the names of the matrices it changes, without `.weight`."""

    name: str
    matrices: Mapping[str, LoraMatrix]


def adapter_fingerprint(folder: Path) -> str:
    """A hash of an adapter's files."""
    return hashlib.sha256(b"".join((folder / part).read_bytes() for part in FILES)).hexdigest()[:12]


def load_adapter(name: str, folder: Path, config: ModelConfig) -> Adapter:
    """The adapter in a folder, checked against the model that it is for."""
    for part in FILES:
        if not (folder / part).is_file():
            raise CheckpointError(
                f"the adapter {name} has no {part} in {folder}: give a folder that peft has saved, as "
                f"--lora-modules {name}=FOLDER."
            )
    fields = Fields(read_json(folder / "adapter_config.json"), f"{folder.name}/adapter_config.json")
    _check_supported(fields, config)
    layout, by_root = FAMILIES[config.family].files, fields.flag("use_rslora", False)
    sides: dict[str, dict[str, SafeTensor]] = {}
    stacks: dict[str, dict[str, SafeTensor]] = {}
    file_names: dict[str, str] = {}  # of modules
    for stored, tensor in read_safetensors(folder / "adapter_model.safetensors").items():
        match = TENSOR.fullmatch(stored)
        module = our_name(f"{match['module']}.weight", layout) if match else ""
        if module is None:  # of a vision model beside ours
            continue
        module = module.removesuffix(".weight")
        is_stack = STACK.fullmatch(module) is not None and config.moe is not None
        if match is None or not (is_stack or MODULE.fullmatch(module)):
            raise UnsupportedModelError(
                f"{folder.name}: the tensor {stored[:120]} is not supported; adapters may change the "
                "projections of attention, of recurrent layers, of MLPs and of experts, but neither "
                "convolutions, decay rates nor norms, nor the latent space of experts. Train it "
                "with other target_modules or target_parameters, or merge it into the model."
            )
        (stacks if is_stack else sides).setdefault(module, {})[match["side"]] = tensor
        file_names[module] = match["module"]
    matrices: dict[str, LoraMatrix] = {}
    changes = [
        (file_names[module], *change)
        for module, found in sides.items()
        for change in _changes(folder, module, found, layout, config)
    ]
    for module, found in stacks.items():
        experts = file_names[module].partition(".base_layer")[0]
        for parameter, matrix, down, up in expert_changes(folder, module, found, layout, config):
            changes.append((f"{experts}.{parameter}", matrix, down, up))
    for file_name, matrix, down, up in changes:
        rank = down.shape[0]
        if matrix in matrices:
            raise CheckpointError(
                f"{folder.name} changes {matrix} twice, once as a part of another matrix. The file is "
                "damaged: fetch it again."
            )
        if rank > max(down.shape[1], len(up)):  # backends' buffers hold as many numbers as a row
            raise UnsupportedModelError(
                f"{folder.name} has rank {rank} for {matrix}, more than the matrix has rows or columns. "
                "Merge the adapter into the model, and serve that."
            )
        scale = np.float32(_alpha(fields, file_name) / (rank**0.5 if by_root else rank))
        matrices[matrix] = LoraMatrix(down, up * scale)
    if not matrices:
        raise CheckpointError(f"{folder.name} changes no matrix. The file is incomplete: fetch it again.")
    return Adapter(name, matrices)


def _check_supported(fields: Fields, config: ModelConfig) -> None:
    if fields.text("peft_type", "LORA") != "LORA":
        raise UnsupportedModelError(
            f"{fields.source}: peft_type {fields.text('peft_type')!r} is not supported, only LORA. Merge the "
            "adapter into the model, and serve that."
        )
    if config.hidden_factors:
        raise UnsupportedModelError(
            f"{fields.source}: a GGUF file of {config.family} has factors in its weights that it does not "
            "tell, and that the adapter lacks. Serve the safetensors of this model, or merge the adapter "
            "into it before the conversion."
        )
    for option, neutral in NEUTRAL.items():
        if fields.has(option) and fields.values[option] not in neutral:
            raise UnsupportedModelError(
                f"{fields.source}: {option} {str(fields.values[option])[:60]!r} is not supported. Merge the "
                "adapter into the model, and serve that."
            )


def _alpha(fields: Fields, name: str) -> float:
    """The alpha of a module or parameter of the file: of the first pattern that ends its name, as in peft."""
    by_pattern = fields.group("alpha_pattern")
    for pattern in by_pattern.values:
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return by_pattern.number(pattern)
        except re.error as error:
            raise by_pattern.wrong(pattern, f"a regular expression as its name ({error})") from error
    return fields.number("lora_alpha", 8.0)


def _changes(
    folder: Path, module: str, found: Mapping[str, SafeTensor], layout: FileLayout, config: ModelConfig
) -> Iterator[tuple[str, Float32Array, Float32Array]]:
    """What a module of a file changes: the names of matrices, and down and up of each, not scaled."""
    down, up = checked_sides(folder, module, found)
    shapes, first = dict(expected_tensors(config)), down.float32()
    for name, rows in converted({f"{module}.weight": up}, layout, config):
        if name not in shapes and not any(part in fused_matrices(config, False) for part in name.split(".")):
            raise UnsupportedModelError(
                f"{folder.name} changes {module}, which this model lacks: its layer has experts or none, or "
                "the adapter is of a model with more layers. Train it with other target_modules, or merge it "
                "into its model."
            )
        if shapes.get(name) != (rows.shape[0], down.shape[1]):
            raise wrong_shape(folder, module)
        module_name = name.removesuffix(".weight")
        yield module_name, *_as_tiled(module_name, first, rows.float32(), config.recurrent)


def _as_tiled(
    name: str, down: Float32Array, up: Float32Array, recurrent: RecurrentConfig | None
) -> tuple[Float32Array, Float32Array]:
    """Down and up in the model's order of value heads, which is another one in some GGUF files.

    adapter, safetensors    k0v0 k0v1 k1v0 k1v1     value heads that share a key head are neighbours
    tiled_values            k0v0 k1v0 k0v1 k1v1
    """
    part = name.rpartition(".linear_attn.")[2]
    if recurrent is None or not recurrent.tiled_values or part == name:
        return down, up
    size = 1 if part in ("in_proj_a", "in_proj_b") else recurrent.value_dim
    heads = np.arange(recurrent.value_heads * size).reshape(recurrent.key_heads, -1, size)
    order = heads.swapaxes(0, 1).ravel()
    if part == "out_proj":  # which reads the values of all heads
        return np.ascontiguousarray(down[:, order]), up
    before = len(up) - len(order)  # queries and keys
    return down, np.concatenate((up[:before], up[before:][order]))
