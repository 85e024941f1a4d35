"""The heads that come with the package, each in a folder of its own beside this file."""

from __future__ import annotations

from pathlib import Path

from paceline.draft.heads.checkpoint import FINGERPRINT, WEIGHTS
from paceline.models.safetensors_files import read_metadata

SHIPPED = Path(__file__).parent / "shipped"


def shipped_head(fingerprint: str) -> Path | None:
    """The folder of the head that is shipped for the target of this fingerprint; None if there is none."""
    for weights in sorted(SHIPPED.glob(f"*/{WEIGHTS[0]}")):
        if read_metadata(weights).get(FINGERPRINT) == fingerprint:
            return weights.parent
    return None
