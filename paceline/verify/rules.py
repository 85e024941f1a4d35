"""The table of acceptance rules."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.verify.classic import verify_block, verify_rejection, verify_traversal
from paceline.verify.pathwise import verify_pathwise
from paceline.verify.verdict import Rule


@dataclass(frozen=True)
class RuleEntry:
    """A rule and its declared properties."""

    verify: Rule
    same_bytes: bool  # the output is that of plain decoding, byte for byte; else in distribution
    trees: bool  # takes trees, not chains only


RULES: dict[str, RuleEntry] = {
    "pathwise": RuleEntry(verify_pathwise, same_bytes=True, trees=True),
    "rejection": RuleEntry(verify_rejection, same_bytes=False, trees=True),
    "block": RuleEntry(verify_block, same_bytes=False, trees=False),
    "traversal": RuleEntry(verify_traversal, same_bytes=False, trees=True),
}
