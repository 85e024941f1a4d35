"""How drafts fare, from what a user says or from what `paceline bench` has found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.bench.run.speculation import OFF
from paceline.bench.simulate.world import Acceptance
from paceline.draft.methods import AUTO
from paceline.errors import ConfigError
from paceline.options import check_number

CHAIN = "chain"  # the drafter of whom only the acceptance is known
DEEPEST = 64

Drafters = dict[str, list[Acceptance]]  # of each drafter those that requests take in turn


def of_alpha(alpha: float) -> Drafters:
    """Every token is right with this chance, if all before it are."""
    check_number(ConfigError, "alpha", alpha, 0.0, 1.0)
    return {CHAIN: [Acceptance.constant(alpha, DEEPEST)]}


def of_depths(text: str) -> Drafters:
    """Shares that are right down to each depth, such as 0.6,0.4,0.25."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not shares[0] <= 1.0 or shares[-1] < 0.0 or shares != sorted(shares, reverse=True):
        raise ConfigError(
            "--acceptance must be shares from 1 to 0 that do not rise, one for each depth, such as "
            f"0.6,0.4,0.25; got {text!r}."
        )
    return {CHAIN: [Acceptance(tuple(shares))]}


def of_bench(path: Path) -> Drafters:
    """The methods of a file that `paceline bench --json` wrote, each as in all of its rows by turns."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found: Drafters = {}
        for row in rows:
            if row["method"] not in (OFF, AUTO) and row["acceptance_per_position"]:
                found.setdefault(row["method"], []).append(_of_row(row))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--from {path} cannot be read ({error}): give a file that `paceline bench --json` wrote."
        ) from None
    if not found:
        raise ConfigError(f"--from {path} has no row in which something was drafted: name --methods there.")
    return found


def _of_row(row: Mapping[str, Any]) -> Acceptance:
    """A row's shares are of drafted passes; here they are of all."""
    share = 1.0 if row.get("drafted_share") is None else float(row["drafted_share"])
    accepted = [share * float(value) for value in row["acceptance_per_position"]]
    told = row.get("drafted_per_position") or [1.0] * len(accepted)
    drafted = [max(share * float(value), least) for value, least in zip(told, accepted, strict=True)]
    return Acceptance(tuple(accepted), tuple(drafted))
