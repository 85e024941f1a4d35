"""Drafting: trees of guessed tokens, and the protocol of those who guess."""

from paceline.draft.base import Drafter, DrafterNeeds, Features
from paceline.draft.trees import PLAIN, DraftPlan, DraftTrees

__all__ = ["PLAIN", "DraftPlan", "DraftTrees", "Drafter", "DrafterNeeds", "Features"]
