"""What could draft for a model, as far as its files tell."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.models.checkpoint import Checkpoint
from paceline.models.heads.fingerprint import target_fingerprint
from paceline.models.heads.registry import METHODS
from paceline.models.heads.shipped import shipped_head


def possible_drafters(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Each method, and whether it can draft for the model, or why not."""
    yield from (("ngram", "yes"), ("suffix", "yes"))
    yield "draft_model", "yes, with a smaller model that has the same tokens"
    is_recurrent = checkpoint.config.recurrent is not None
    why = "recurrent layers cannot take back the states of a rejected draft"
    yield "layerskip", f"refused: {why}" if is_recurrent else "yes"
    yield "mtp", "yes" if checkpoint.mtp else "refused: the files have no block for multi-token prediction"
    has_assistants = checkpoint.config.family.startswith("gemma4")
    yield "assistant", "yes, with its assistant" if has_assistants else "refused: only Gemma 4 has assistants"
    fingerprint = target_fingerprint(checkpoint)
    for method in METHODS:
        head = "the shipped head" if shipped_head(method, fingerprint) else "a head trained for this model"
        yield method, f"yes, with {head}"
