"""The fingerprint of a target, and the check that a head was trained for it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from paceline.errors import HeadMismatchError
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import WEIGHTS
from paceline.models.heads.config import HeadConfig, TargetName


def target_fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of a model that is the same for all its quantizations.

    It covers the sizes and the weights of the norms, which training changes and quantization does not: files
    store them as they were trained, rounded to bfloat16 or not.
    """
    config = checkpoint.config
    digest = hashlib.sha256()
    digest.update(f"{config.vocab_size} {config.hidden_size} {config.num_layers}".encode())
    for name in sorted(name for name in checkpoint.tensors if name.endswith("norm.weight")):
        digest.update(name.encode())
        digest.update(encode(checkpoint.tensors[name].float32(), "BF16").data.tobytes())
    return digest.hexdigest()[:16]


def check_target(
    head: HeadConfig, target: ModelConfig, fingerprint: str, source: str, any_target: bool = False
) -> None:
    """HeadMismatchError if the head does not fit this target.

    `any_target` accepts another model of the same sizes. An empty fingerprint is unknown, and accepted.
    """
    sizes = (head.vocab_size, head.target_hidden_size)
    if sizes != (target.vocab_size, target.hidden_size):
        raise HeadMismatchError(
            f"the head {source} is for a target with {sizes[0]} tokens and hidden size {sizes[1]}, but this "
            f"one has {target.vocab_size} and {target.hidden_size}. Use a head that was trained for it."
        )
    layers = head.layers_of(target.num_layers)
    if not all(0 <= layer <= target.num_layers for layer in layers):
        raise HeadMismatchError(
            f"the head {source} reads the hidden states {list(layers)}, but this target has only 0 to "
            f"{target.num_layers}. Use a head that was trained for it."
        )
    if not head.own_embedding and head.hidden_size != target.hidden_size:
        raise HeadMismatchError(
            f"the head {source} has no embedding of its own, and its hidden size {head.hidden_size} is not "
            f"the target's, {target.hidden_size}. Fetch the head again, with all of its files."
        )
    family = FAMILIES.get(target.family)
    if head.block is not None and head.target is None and family and family.files.interleaved_rope:
        # it pairs dimensions as the target's files do, which its own file does not say, and not as we do
        raise HeadMismatchError(
            f"the head {source} is for a {target.family} model, whose files interleave the rotary embedding; "
            f"{head.kind} heads of others for it are not read. Train one for it with paceline."
        )
    check_fingerprint(head.target, fingerprint, source, any_target)


def check_fingerprint(
    trained_for: TargetName | None, fingerprint: str, source: str, any_target: bool
) -> None:
    """HeadMismatchError if a head was trained for another target than that of this fingerprint."""
    if trained_for is None or not fingerprint or trained_for.fingerprint == fingerprint or any_target:
        return
    raise HeadMismatchError(
        f"the head {source} was trained for another target, {trained_for.name or 'without a name'} "
        f"({trained_for.fingerprint}; this one is {fingerprint}). It would guess badly, though never change "
        "the output. Use a head that was trained for this target, or set any_target to use it all the same."
    )


def head_fingerprint(head: Path) -> str:
    """A hash of a head's files, by which a candidate names its parent."""
    folder = head if head.is_dir() else head.parent
    files = [head] if head.suffix == ".gguf" else [folder / name for name in ("config.json", *WEIGHTS)]
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
