"""The heads that come with the package: shipped/METHOD/NAME beside this file, each a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.models.heads.checkpoint import FINGERPRINT, WEIGHTS
from paceline.models.safetensors_files import read_metadata

DRAFTS = "drafts.json"  # in a head's folder: what a controller begins with, see examples/known_drafts.py
SHIPPED = Path(__file__).parent / "shipped"
DEFAULT_METHOD = "eagle3"  # of a target that has a head, where the user names none


def shipped_head(method: str, fingerprint: str) -> Path | None:
    """The folder of the method's head for the target of this fingerprint; None if none is shipped."""
    for weights in sorted((SHIPPED / method).glob(f"*/{WEIGHTS[0]}")):
        if read_metadata(weights).get(FINGERPRINT) == fingerprint:
            return weights.parent
    return None


def default_method(fingerprint: str) -> str | None:
    """What drafts for the target of this fingerprint if the user says nothing; None if no head is shipped."""
    return None if shipped_head(DEFAULT_METHOD, fingerprint) is None else DEFAULT_METHOD


def known_drafts(fingerprint: str) -> Mapping[str, Any]:
    """What drafts for the target of this fingerprint were worth on our own workloads; empty if unknown."""
    head = shipped_head(DEFAULT_METHOD, fingerprint)
    if head is None or not (head / DRAFTS).exists():
        return {}
    known: dict[str, Any] = json.loads((head / DRAFTS).read_text())
    return known
