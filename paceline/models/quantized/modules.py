"""The tensors of quantized safetensors as matrices: each one's codes, zero points and scales together."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from paceline.models.checkpoint import Tensor
from paceline.models.quantized.layouts import Parts, awq, fp4, fp8, gptq, int8, packed
from paceline.models.quantized.method import Quantization

# last parts of the names of a matrix's tensors; `weight` may also be an ordinary matrix or a norm
PARTS = {"weight", "weight_scale", "weight_scale_inv", "weight_zero_point"}
PARTS |= {"weight_scale_2", "weight_global_scale"}
PARTS |= {"weight_packed", "weight_shape", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx"}
# of activations, which are not quantized here
ACTIVATIONS = {"input_scale", "input_zero_point", "activation_scale", "input_scale_inv"}
ACTIVATIONS |= {"input_global_scale", "input_scale_ub"}
KV_SCALES = {"k_scale", "v_scale", "q_scale", "kv_scale", "output_scale", "prob_output_scale"}
WORD_READERS = {"awq": awq, "gptq": gptq}

logger = logging.getLogger(__name__)


def dequantized(tensors: Mapping[str, Tensor], quantization: Quantization) -> dict[str, Tensor]:
    """The tensors with each quantized matrix as one `weight`, decoded when it is read.

    Scales of activations are left out: what they would round stays as it is. So are scales of keys and
    values, with a warning.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    made: dict[str, Tensor] = {}
    ignored = 0
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in PARTS:
            modules.setdefault(module, {})[part] = tensor
        elif part in KV_SCALES:
            ignored += 1
        elif part not in ACTIVATIONS:
            made[name] = tensor
    if ignored:
        logger.warning("%d scales of keys and values are ignored: the KV cache is not quantized.", ignored)
    for module, parts in modules.items():
        made |= _matrix(module, parts, quantization)
    return made


def _matrix(module: str, parts: Parts, quantization: Quantization) -> dict[str, Tensor]:
    """The module's tensors: one decoded matrix, or those of a module that is not quantized."""
    name = f"{module}.weight"
    if "qweight" in parts and quantization.method in WORD_READERS:
        return {name: WORD_READERS[quantization.method](module, parts, quantization)}
    if "weight_packed" in parts:
        read_packed = fp4 if parts["weight_packed"].kind == "U8" else packed
        return {name: read_packed(module, parts, quantization)}
    readers = {"F8_E4M3": fp8, "I8": int8, "U8": fp4}
    if "weight" in parts and (read := readers.get(parts["weight"].kind)):
        return {name: read(module, parts, quantization)}
    return {f"{module}.{part}": tensor for part, tensor in parts.items()}
