"""LoRA adapters: folders of peft, as pairs of small matrices that are added to a model's own.

    W x  becomes  W x + scale * B (A x)        A [rank, in], B [out, rank]

A folder has adapter_config.json and adapter_model.safetensors. Only what changes a matrix of the layers is
read; what would change anything else (biases, embeddings, experts, DoRA) is refused. What changes a matrix
that is several of ours (qkv_proj, gate_up_proj) is split.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.config import ModelConfig
from paceline.models.families.fields import Fields
from paceline.models.families.table import FAMILIES
from paceline.models.files.file_layouts import LLAMA_FILES, our_name
from paceline.models.files.layout import expected_tensors
from paceline.models.files.mapped import read_json
from paceline.models.files.safetensors_files import SafeTensor, read_safetensors

FILES = ("adapter_config.json", "adapter_model.safetensors")
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.(?:default\.)?weight")
MODULE = re.compile(
    r"(?P<layer>model\.layers\.\d+\.)(?P<part>self_attn\.([qkvo]|qkv)_proj|mlp\.(gate|up|gate_up|down)_proj)"
)
FUSED = {  # in the order of their rows
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# options that make an adapter something else than the sum above, and the values that do not
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": (),
    "layer_replication": (),
    "target_parameters": ([],),
    "alora_invocation_tokens": (),  # it would change only what comes after them
    "use_qalora": (False,),
    # others change the model's own matrices before the training
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class LoraMatrix:
    """What an adapter adds to one matrix."""

    down: npt.NDArray[np.float32]  # A [rank, in]
    up: npt.NDArray[np.float32]  # B [out, rank], times the scale


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
    by_root = fields.flag("use_rslora", False)
    sides: dict[str, dict[str, SafeTensor]] = {}
    alphas: dict[str, float] = {}
    for stored, tensor in read_safetensors(folder / "adapter_model.safetensors").items():
        match = TENSOR.fullmatch(stored)
        module = our_name(match["module"], LLAMA_FILES) if match else ""
        if module is None:  # of a vision model beside ours
            continue
        if match is None or not MODULE.fullmatch(module):
            raise UnsupportedModelError(
                f"{folder.name}: the tensor {stored[:120]} is not supported; adapters may change the "
                "projections of attention and of dense MLPs. Train it with other target_modules and without "
                "target_parameters, or merge it into the model."
            )
        sides.setdefault(module, {})[match["side"]] = tensor
        alphas[module] = _alpha(fields, match["module"])
    shapes = dict(expected_tensors(config))
    matrices: dict[str, LoraMatrix] = {}
    for module, found in sides.items():
        names = _parts(module)
        own = [shapes[f"{name}.weight"] for name in names if f"{name}.weight" in shapes]
        whole = (sum(rows for rows, _ in own), own[0][1]) if len(own) == len(names) else None
        down, up = _checked(folder, module, found, whole)
        rank, first = down.shape[0], down.float32()
        second = up.float32() * np.float32(alphas[module] / (rank**0.5 if by_root else rank))
        rows = np.split(second, np.cumsum([count for count, _ in own])[:-1])
        if not matrices.keys().isdisjoint(names):
            raise CheckpointError(
                f"{folder.name} changes {names[0]} twice, once as a part of another matrix. The file is "
                "damaged: fetch it again."
            )
        matrices |= {name: LoraMatrix(first, part) for name, part in zip(names, rows, strict=True)}
    if not matrices:
        raise CheckpointError(f"{folder.name} changes no matrix. The file is incomplete: fetch it again.")
    return Adapter(name, matrices)


def _check_supported(fields: Fields, config: ModelConfig) -> None:
    if fields.text("peft_type", "LORA") != "LORA":
        raise UnsupportedModelError(
            f"{fields.source}: peft_type {fields.text('peft_type')!r} is not supported, only LORA. Merge the "
            "adapter into the model, and serve that."
        )
    for option, neutral in NEUTRAL.items():
        if fields.has(option) and fields.values[option] not in neutral:
            raise UnsupportedModelError(
                f"{fields.source}: {option} {str(fields.values[option])[:60]!r} is not supported. Merge the "
                "adapter into the model, and serve that."
            )
    if not FAMILIES[config.family].files.keeps_matrices or config.recurrent or config.latent:
        raise UnsupportedModelError(
            f"{fields.source}: adapters of {config.family} models are not supported. Merge the adapter into "
            "the model, and serve that."
        )


def _alpha(fields: Fields, module: str) -> float:
    """The alpha of a module of the file: that of the first pattern which its name ends with, as in peft."""
    by_pattern = fields.group("alpha_pattern")
    for pattern in by_pattern.values:
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return by_pattern.number(pattern)
        except re.error as error:
            raise by_pattern.wrong(pattern, f"a regular expression as its name ({error})") from error
    return fields.number("lora_alpha", 8.0)


def _parts(module: str) -> list[str]:
    """The matrices of ours that a module of a file is."""
    match = MODULE.fullmatch(module)
    assert match is not None, "asked before"
    return [match["layer"] + part for part in FUSED.get(match["part"], (match["part"],))]


def _checked(
    folder: Path, module: str, found: Mapping[str, SafeTensor], shape: tuple[int, ...] | None
) -> tuple[SafeTensor, SafeTensor]:
    """Both sides of a matrix's change. CheckpointError if they do not fit the model."""
    down, up = found.get("A"), found.get("B")
    fits = (
        down is not None
        and up is not None
        and len(down.shape) == len(up.shape) == 2
        and (up.shape[0], down.shape[1]) == shape
        and up.shape[1] == down.shape[0]
    )
    if shape is None:
        raise UnsupportedModelError(
            f"{folder.name} changes {module}, which this model lacks: its layer has experts, or the adapter "
            "is of a model with more layers. Train it with other target_modules, or merge it into its model."
        )
    if not fits or down is None or up is None:
        raise CheckpointError(
            f"{folder.name}: what is there for {module} does not fit this model's matrix "
            f"{list(shape)}. The adapter belongs to another model: serve that one."
        )
    return down, up
