"""The heads that come with the package, in the folders shipped/METHOD/NAME next to this file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.models.files.safetensors_files import read_metadata
from paceline.models.heads.checkpoint import FINGERPRINT, WEIGHTS

DRAFTS = "drafts.json"  # in a head's folder: the controller's prior, see examples/known_drafts.py
SHIPPED_HEAD = "shipped"  # the name of the head that is shipped for a target
SHIPPED = Path(__file__).parent / "shipped"
DEFAULT_TARGET = "smollm2-135m"  # whose head is meant where no target is named
DEFAULT_METHOD = "eagle3"  # for a target with a shipped head, if the user names no method


def shipped_head(method: str, fingerprint: str) -> Path | None:
    """The folder of the method's head for the target of this fingerprint; None if none is shipped."""
    for weights in sorted((SHIPPED / method).glob(f"*/{WEIGHTS[0]}")):
        if read_metadata(weights).get(FINGERPRINT) == fingerprint:
            return weights.parent
    return None


def default_method(fingerprint: str) -> str | None:
    """The default method for the target of this fingerprint; None if no head is shipped for it."""
    return None if shipped_head(DEFAULT_METHOD, fingerprint) is None else DEFAULT_METHOD


def known_drafts(fingerprint: str) -> Mapping[str, Any]:
    """The controller's prior for the target of this fingerprint, measured on our workloads; may be empty."""
    head = shipped_head(DEFAULT_METHOD, fingerprint)
    if head is None or not (head / DRAFTS).exists():
        return {}
    drafts: dict[str, Any] = json.loads((head / DRAFTS).read_text())
    return drafts
