"""How each backend can keep weights: the names of --quantization, and the bytes of a value.

`native` keeps the blocks of a file where there are kernels for them; others are made while loading.
"""

from __future__ import annotations

INT8 = 34 / 32  # bytes of a value: 8 bits, and a 16-bit scale for 32 values
INT4 = 18 / 32
INT4_WITH_MINIMUM = 20 / 32
FP8 = 1.0  # its scales are few
FP8_IN_BLOCKS = 1 + 4 / 128  # a float32 scale for 128 values of a row
NATIVE = 0.0  # as many as the blocks of the file have, see BLOCKS

QUANTIZATIONS = {
    "cpu": {"none": 4.0, "native": NATIVE, "int8": INT8, "int4": INT4_WITH_MINIMUM},
    "torch": {"none": 4.0, "int8": INT8, "int4": INT4_WITH_MINIMUM, "fp8": FP8},
    "cuda": {"none": 2.0, "native": NATIVE, "int8": INT8, "int4": INT4, "fp8": FP8},
}
# what `native` keeps, by checkpoint.Tensor.kind; all else becomes int8
BLOCKS = {
    "cpu": {"Q4_0": INT4_WITH_MINIMUM, "Q4_1": INT4_WITH_MINIMUM, "Q4_K": 18.5 / 32, "Q6_K": 210 / 256},
    "cuda": {
        "Q4_0": INT4,
        "Q4_1": INT4_WITH_MINIMUM,
        "Q4_K": 144 / 256,
        "Q6_K": 210 / 256,
        "Q8_0": INT8,
        "MXFP4": INT4,
        "FP8": FP8,
        "FP8 in blocks": FP8_IN_BLOCKS,
    },
}
DEFAULTS = {"cpu": "native", "torch": "none", "cuda": "none"}  # what `auto` means


def is_packed(name: str) -> bool:
    """Whether `torch` and `cuda` keep this tensor in the bits of a quantization: the projections of layers.

    Not one of latent attention that is cut up, not multiplied.
    """
    is_projection = name.endswith(("_proj.weight", ".kv_a_proj_with_mqa.weight"))
    return is_projection and not name.endswith(".kv_b_proj.weight")
