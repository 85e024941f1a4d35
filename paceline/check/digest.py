"""The digest of a fixed generation by the cpu backend: the same on every machine, for `paceline check`.

The model is made here, of bytes that numpy promises never to change, with a matrix of every weight format.
All logits of a prompt and of the greedy answer to it go into the digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from paceline.backends.cpu import CpuBackend
from paceline.core.forward import chain_batch
from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.files.safetensors_writer import encode
from paceline.models.gguf.blocks import FORMATS
from paceline.models.gguf.reader import GgufTensor

CONFIG = ModelConfig(
    family="llama",
    vocab_size=512,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    max_position=128,
    tie_embeddings=False,
)
PROMPT, ANSWER = 40, 24  # tokens
# The kind of a tensor by the last part of its name
KINDS = {
    "embed_tokens": "Q4_1",
    "q_proj": "Q4_0",
    "k_proj": "Q8_0",
    "v_proj": "Q6_K",
    "o_proj": "Q4_1",
    "gate_proj": "Q4_K",
    "up_proj": "Q4_1",
    "down_proj": "Q4_K",
    "lm_head": "Q6_K",
}
# Places of the half floats in a block, and values that make weights about as large as 1 / sqrt(hidden size)
HALVES = {
    "Q4_0": {0: 2.0**-6},
    "Q4_1": {0: 2.0**-6, 2: -7.5 * 2.0**-6},
    "Q4_K": {0: 2.0**-11, 2: 7.5 * 2.0**-11},
    "Q6_K": {208: 2.0**-15},
    "Q8_0": {0: 2.0**-10},
}
# What every machine gives: changed only with the arithmetic itself, which the changelog then says
EXPECTED = "e21707309dfe6e49"


def compare_digest() -> str:
    """A summary: whether this machine gives the digest that all should give."""
    return summary(generation_digest(), EXPECTED)


def summary(found: str, expected: str) -> str:
    """The digest and what it tells. Another one is no error: this machine agrees with itself."""
    if found == expected:
        return f"digest {found}, as on every machine"
    return (
        f"digest {found}, not {expected} as on other machines: the same request may give other text there; "
        "please report it with this output"
    )


def generation_digest(threads: int | None = None) -> str:
    """A digest of all logits of a prompt and a greedy answer."""
    backend = CpuBackend.load(tiny_checkpoint(), quantization="native", threads=threads, max_rows=PROMPT)
    try:
        return _generate(backend)
    finally:
        backend.close()


def _generate(backend: CpuBackend) -> str:
    pages = -(-(PROMPT + ANSWER) // backend.page_size)
    pool, digest = backend.make_pool(pages), hashlib.sha256()
    tokens, before = np.arange(PROMPT, dtype=np.int32) * 7 % CONFIG.vocab_size, 0
    for _ in range(ANSWER):
        logits = backend.forward(chain_batch(pool, [(tokens, before, 0)], pages)).logits
        digest.update(logits.astype("<f4").tobytes())
        before += len(tokens)
        tokens = np.array([np.argmax(logits[-1])], dtype=np.int32)
    return digest.hexdigest()[:16]


def tiny_checkpoint() -> Checkpoint:
    """A model of random blocks, the same everywhere and for ever."""
    random, tensors = np.random.RandomState(1), dict[str, Tensor]()  # its stream of bytes is frozen
    for name, shape in expected_tensors(CONFIG):
        if len(shape) == 2:
            tensors[name] = _random_blocks(KINDS[name.split(".")[-2]], *shape, random)
        else:
            eighths = np.frombuffer(random.bytes(shape[0]), dtype=np.uint8) % 8
            tensors[name] = encode((1 + eighths / 8).astype(np.float32))
    return Checkpoint(CONFIG, tensors, Path("made in memory"))


def _random_blocks(kind: str, rows: int, depth: int, random: np.random.RandomState) -> GgufTensor:
    form = FORMATS[kind]
    shape = rows, depth // form.block_size, form.block_bytes
    blocks = np.frombuffer(random.bytes(int(np.prod(shape))), dtype=np.uint8).reshape(shape).copy()
    for place, value in HALVES[kind].items():
        blocks[:, :, place : place + 2] = np.array([value], dtype="<f2").view(np.uint8)
    return GgufTensor((rows, depth), kind, blocks.reshape(rows, -1))
