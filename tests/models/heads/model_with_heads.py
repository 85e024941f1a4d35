"""A tiny model in a folder, and two heads beside it: `head3` and `head4`."""

from __future__ import annotations

from pathlib import Path

from paceline.models.heads.checkpoint import write_head
from tests.draft.model.test_draft_model_cpu import save_model
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import EAGLE3


def save_model_with_heads(folder: Path) -> Path:
    save_model(folder)
    for seed in (3, 4):
        write_head(random_checkpoint(EAGLE3, seed), folder / f"head{seed}", "sglang")
    return folder
