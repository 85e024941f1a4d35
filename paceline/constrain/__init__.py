"""Structured outputs: JSON schemas, regular expressions, choices and grammars as token masks."""

from paceline.constrain.compiler import Grammar, GrammarCompiler
from paceline.constrain.constraint import Constraint
from paceline.constrain.limits import GrammarLimits
from paceline.core.structured_outputs import StructuredOutputsParams

__all__ = ["Constraint", "Grammar", "GrammarCompiler", "GrammarLimits", "StructuredOutputsParams"]
