"""Drafting: trees of guessed tokens, and the protocol of those who guess."""

from paceline.core.features import Features
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import Drafter, DrafterNeeds

__all__ = ["PLAIN", "DraftPlan", "DraftTrees", "Drafter", "DrafterNeeds", "Features"]
