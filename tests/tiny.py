"""Tiny random checkpoints of every family, made by transformers' own classes.

Their configurations are in tests/tiny_families.py. Checkpoints are kept between runs, and transformers, which
takes seconds to import, is imported where its models are used.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests import tiny_families, tiny_near_families
from tests.tiny_families import FAMILIES, MORE_FAMILIES, MORE_HYBRIDS, ROPES_BY_LENGTH, TORCH_FAMILIES
from tests.tiny_near_families import NEAR_FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def random_model(family: str) -> PreTrainedModel:
    """A float32 model of the family in which every weight, norms and biases too, is random."""
    import transformers

    known = FAMILIES | TORCH_FAMILIES | MORE_HYBRIDS | MORE_FAMILIES | ROPES_BY_LENGTH | NEAR_FAMILIES
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}  # fused: even sizes
    made = known[family]
    if made.model:
        module = importlib.import_module(made.model.rpartition(".")[0])
        own = getattr(module, made.model.rpartition(".")[2])
        model: PreTrainedModel = own._from_config(made.config(), **options).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_config(made.config(), **options).eval()
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # scaled so that logits spread over several units: a wrong bias or mask shows at once; norms
            # are around what they begin with, which is 0 where they are stored without their 1
            around = parameter.mean() if "norm" in name else 0
            scale = 0.2 if "norm" in name else 1.0 if "conv1d" in name else 0.25
            parameter.copy_(around + scale * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                around = 1.0 if name.endswith("layer_scalar") else 0.0
                buffer.copy_(around + 0.25 * torch.randn(buffer.shape, generator=generator))
    return model


def save_checkpoint(family: str, folder: Path) -> Path:
    """The folder, now holding a random safetensors checkpoint of the family and its config.json."""
    shutil.copytree(_kept(family), folder, dirs_exist_ok=True)
    return folder


@cache
def _kept(family: str) -> Path:
    """The family's checkpoint."""
    return kept(family, lambda folder: random_model(family).save_pretrained(folder))


def kept(name: str, save: Callable[[Path], Any], source: str = "") -> Path:
    """A folder of checkpoints, saved once for these versions and files; `make clean` deletes it.

    `source` is code that made them, beside these files.
    """
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors")]
    sources = [
        Path(path).read_text() for path in (__file__, tiny_families.__file__, tiny_near_families.__file__)
    ]
    made_of = "\0".join([*versions, *sources, *([source] if source else [])])
    root = Path(__file__).parents[1] / ".pytest_cache" / "tiny"
    kept = root / f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    if not kept.exists():
        made = root / f"{kept.name}.{os.getpid()}"
        save(made)
        try:
            made.rename(kept)  # whole or not at all
        except OSError:  # another process was first
            shutil.rmtree(made)
    return kept
