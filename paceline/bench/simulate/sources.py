"""Acceptance of drafts, from the command line or from results of `paceline bench`."""

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

CHAIN = "chain"  # the drafter known only by its acceptance
DEEPEST = 64

Drafters = dict[str, list[Acceptance]]  # per drafter, the acceptances that requests use in turn


def of_alpha(alpha: float) -> Drafters:
    """Each token is accepted with probability `alpha` if all before it are."""
    check_number(ConfigError, "alpha", alpha, 0.0, 1.0)
    return {CHAIN: [Acceptance.constant(alpha, DEEPEST)]}


def of_depths(text: str) -> Drafters:
    """Fractions accepted down to each depth, such as 0.6,0.4,0.25."""
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
    """The methods of a `paceline bench --json` file; requests use the acceptances of their rows in turn."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        drafters: Drafters = {}
        for row in rows:
            if row["method"] not in (OFF, AUTO) and row["acceptance_per_position"]:
                drafters.setdefault(row["method"], []).append(_of_row(row))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--from {path} cannot be read ({error}): give a file that `paceline bench --json` wrote."
        ) from None
    if not drafters:
        raise ConfigError(f"--from {path} has no row in which something was drafted: name --methods there.")
    return drafters


def _of_row(row: Mapping[str, Any]) -> Acceptance:
    """Fractions of all passes, from a row's fractions of drafted passes."""
    share = 1.0 if row.get("drafted_share") is None else float(row["drafted_share"])
    accepted = [share * float(value) for value in row["acceptance_per_position"]]
    reported = row.get("drafted_per_position") or [1.0] * len(accepted)
    drafted = [max(share * float(value), minimum) for value, minimum in zip(reported, accepted, strict=True)]
    return Acceptance(tuple(accepted), tuple(drafted))
