"""Prints the instruction set in use and digests of logits, as JSON, for a test that forces a machine."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from paceline.backends.cpu import CpuBackend
from paceline.backends.cpu.primitives.isa import ISA
from paceline.check.digest import generation_digest
from tests.backends.adapters import random_adapters
from tests.backends.cpu.checkpoints import (
    RECURRENCES,
    all_blocks_checkpoint,
    blocks_checkpoint,
    latent_checkpoint,
    normed_experts_checkpoint,
    recurrent_checkpoint,
    uneven_checkpoint,
)
from tests.backends.driver import drive

ADAPTED = " with a LoRA adapter"


def digests() -> dict[str, str]:
    """A digest of the logits of a prefill, a tree and a decode, for each model and quantization."""
    found = {"paceline check": generation_digest()}
    models = {"blocks": blocks_checkpoint(), "uneven": uneven_checkpoint(), "latent": latent_checkpoint()}
    models |= {"all blocks": all_blocks_checkpoint(), "normed experts": normed_experts_checkpoint()}
    models |= {kind: recurrent_checkpoint(kind) for kind in RECURRENCES}
    models |= {name + ADAPTED: models[name] for name in ("blocks", "uneven")}
    for model, checkpoint in models.items():
        adapters = random_adapters(checkpoint.config) if model.endswith(ADAPTED) else []
        for quantization in ("native", "int8", "none"):
            options = {"quantization": quantization, "threads": 2, "max_rows": 48}
            backend = CpuBackend.load(checkpoint, **options, adapters=adapters)  # type: ignore[arg-type]
            request = drive(backend, pages_each=4)[0]
            request.adapter = adapters[1].name if adapters else ""
            logits = [
                request.extend(range(40)),
                request.run([1, 2, 3, 4], [-1, 0, 0, 1]),
                request.extend([9]),
            ]
            backend.close()
            assert all(np.isfinite(part).all() for part in logits)
            found[f"{model} {quantization}"] = hashlib.sha256(
                b"".join(part.tobytes() for part in logits)
            ).hexdigest()
    return found


if __name__ == "__main__":
    print(json.dumps({"isa": ISA.name, "digests": digests()}))
