"""How messages name numbers of things."""

from __future__ import annotations

from paceline.words import counted


def test_one_thing_is_singular() -> None:
    assert [counted(number, "rows") for number in (0, 1, 2, 1000)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "1000 rows",
    ]
