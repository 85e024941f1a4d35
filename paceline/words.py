"""How messages name numbers of things."""

from __future__ import annotations


def counted(number: int, things: str) -> str:
    """The number with its noun, given as the plural: `1 row`, `2 rows`."""
    return f"{number} {things.removesuffix('s') if number == 1 else things}"
