"""The files of every shipped head: small, whole, for a named target, and with a card."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.models.heads.checkpoint import load_head
from paceline.models.heads.shipped import SHIPPED

MAX_BYTES = 40_000_000


@pytest.mark.parametrize("folder", sorted(SHIPPED.glob("*/*")), ids=lambda folder: folder.name)
def test_a_shipped_head_is_small_and_whole_and_says_what_it_is(folder: Path) -> None:
    head = load_head(folder)
    assert head.config.kind == folder.parent.name
    assert head.config.target is not None, "auto finds a head by its target's fingerprint"
    assert head.draft_ids is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) < MAX_BYTES
    card = (folder / "README.md").read_text()
    assert all(f"## {part}" in card for part in ("Data", "Training", "Measured acceptance"))
