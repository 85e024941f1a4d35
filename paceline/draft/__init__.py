"""Drafting: the drafter protocol, and one module per drafting method."""

from paceline.core.features import Features
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import Drafter, DrafterNeeds

__all__ = ["PLAIN", "DraftPlan", "DraftTrees", "Drafter", "DrafterNeeds", "Features"]
