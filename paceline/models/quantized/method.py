"""The quantization_config of a config.json: what a model's safetensors hold instead of 16-bit matrices.

Only what the files themselves do not show is read from it: which method, the size of FP8 blocks, the bits
and groups of AWQ and GPTQ. Which matrices are quantized shows in the names of their tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UnsupportedModelError
from paceline.models.families.fields import Fields
from paceline.models.files.mapped import read_json

CONFIG_NAMES = ("quantization_config", "compression_config")  # the second is an old name of the first
# files that had it before config.json did, and the method that is meant
OLD_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
REMEDY = "Use the model in 16 bits, or a GGUF file of it."
COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "dense",
)
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")
FP8_BLOCK = (128, 128)
GPTQ_BITS = (2, 4, 8)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quantization:
    """How a model's matrices are stored."""

    method: str  # as quantization_config names it
    words: str  # for people
    bits: int = 8
    group_size: int = 0  # inputs that share a scale; 0: a file's shapes tell
    zero_offset: int = 0  # what is missing in stored zero points
    block: tuple[int, int] = FP8_BLOCK  # outputs and inputs that share a scale, where scales are in blocks


def with_old_config(values: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """A config.json with the quantization_config that older tools have written into a file of its own."""
    if any(name in values for name in ("text_config", *CONFIG_NAMES)):
        return values
    for name, method in OLD_CONFIGS.items():
        if (folder / name).is_file():
            found = Fields(read_json(folder / name), f"{folder.name}/{name}")
            own = found.group("quantization").values if found.has("quantization") else found.values
            return {**values, CONFIG_NAMES[0]: {"quant_method": method, **own}}
    return values


def read_quantization(
    values: Mapping[str, object], source: str, own: Collection[str] = ()
) -> Quantization | None:
    """The quantization that a config.json declares, checked; None: none, or one of the family's `own`."""
    fields = Fields(values, source)
    for owner in (fields, fields.group("text_config")):
        for name in CONFIG_NAMES:
            if owner.has(name):
                config = owner.group(name)
                usual = "compressed-tensors" if config.has("config_groups") else "(none is named, as in MLX)"
                method = config.text("quant_method", usual)
                if method in own:
                    return None
                if method not in METHODS:
                    known = ", ".join(METHODS)
                    raise _refused(config, f"quant_method {method!r} is not supported, only {known}")
                return METHODS[method](config)
    return None


def _refused(fields: Fields, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fields.source}: {what}. {REMEDY}")


def _fp8(fields: Fields) -> Quantization:
    block = _block(fields, fields.values.get("weight_block_size"))
    kind = f"{block[0]}×{block[1]} blocks" if fields.has("weight_block_size") else "scales by tensor or row"
    return Quantization("fp8", f"FP8, {kind}", block=block)


def _modelopt(fields: Fields) -> Quantization:
    algorithm = fields.text("quant_algo").upper()
    if algorithm not in MODELOPT:
        raise _refused(fields, f"quant_algo {algorithm!r} is not read, only {', '.join(MODELOPT)}")
    return Quantization("modelopt", f"{algorithm.replace('_', ' ')}, of Model Optimizer")


def _auto_round(fields: Fields) -> Quantization:
    """AutoRound writes the layouts of GPTQ and AWQ."""
    layouts = {"auto_round:auto_gptq": _gptq, "auto_round:auto_awq": _awq}
    layout = fields.text("packing_format", "auto_round:auto_gptq")
    if layout not in layouts:
        raise _refused(fields, f"the packing_format {layout!r} is not read, only {', '.join(layouts)}")
    return layouts[layout](fields)


def _awq(fields: Fields) -> Quantization:
    version = fields.text("version", "gemm").lower()
    bits = fields.integer("bits", fields.integer("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise _refused(
            fields, f"AWQ of {bits} bits in the order {version!r} is not read, only 4 bits, 'gemm'"
        )
    size = _group_size(fields, fields.values.get("group_size", fields.values.get("q_group_size", 128)))
    return Quantization("awq", f"AWQ, 4 bits, groups of {size or 'all inputs'}", bits, size)


def _gptq(fields: Fields) -> Quantization:
    bits, stored = fields.integer("bits"), fields.text("checkpoint_format", fields.text("format", "gptq"))
    if bits not in GPTQ_BITS:
        raise _refused(fields, f"GPTQ of {bits} bits is not read, only of 2, 4 and 8")
    if stored not in ("gptq", "gptq_v2"):
        raise _refused(fields, f"the GPTQ checkpoint_format {stored!r} is not read, only gptq and gptq_v2")
    size = _group_size(fields, fields.values.get("group_size", 128))
    order = ", in the order of activations" if fields.flag("desc_act", False) else ""
    words = f"GPTQ, {bits} bits, groups of {size or 'all inputs'}{order}"
    return Quantization("gptq", words, bits, size, zero_offset=1 if stored == "gptq" else 0)


def _compressed(fields: Fields) -> Quantization:
    sparsity = fields.group("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        raise _refused(fields, f"sparse weights ({sparsity}) are not read")
    if fields.group("transform_config").values.get("config_groups"):
        raise _refused(fields, "weights that were rotated (transform_config) are not read")
    if fields.has("kv_cache_scheme"):
        logger.warning("%s: kv_cache_scheme is ignored; keys and values are not quantized.", fields.source)
    groups = fields.group("config_groups")
    formats, kinds, block = set[str](), set[str](), FP8_BLOCK
    for name in groups.values:
        group = groups.group(name)
        weights = group.group("weights")
        formats.add(group.text("format", fields.text("format", "dense")))
        kind, strategy = weights.text("type", "int"), weights.text("strategy", "tensor")
        kinds.add(f"{weights.integer('num_bits', 8)}-bit {kind} by {strategy}")
        if strategy == "block":
            block = _block(weights, weights.values.get("block_structure"))
    unknown = formats - set(COMPRESSED_FORMATS)
    if unknown:
        known = ", ".join(COMPRESSED_FORMATS)
        raise _refused(
            fields, f"compressed-tensors of format {', '.join(sorted(unknown))} are not read, only {known}"
        )
    return Quantization("compressed-tensors", f"compressed-tensors, {', '.join(sorted(kinds))}", block=block)


def _block(fields: Fields, value: object) -> tuple[int, int]:
    """A block's outputs and inputs: [128, 128], or "128x128"."""
    sizes = value.split("x") if isinstance(value, str) else value
    if sizes is None:
        return FP8_BLOCK
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(str(size).isdigit() for size in sizes):
        raise _refused(fields, f"blocks of {str(value)[:40]!r} are not read, only of two sizes")
    rows, columns = (int(size) for size in sizes)
    if not min(rows, columns) > 0:
        raise _refused(fields, f"blocks of {rows}×{columns} are not read")
    return rows, columns


def _group_size(fields: Fields, value: object) -> int:
    """The inputs of a group; 0: all of them."""
    if value == -1:
        return 0
    if type(value) is not int or value < 1:
        raise fields.wrong("group_size", "a positive integer, or -1")
    return value


METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "auto-round": _auto_round,
    "fbgemm_fp8": _fp8,
}
