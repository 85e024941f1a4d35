"""`paceline readiness`: the checks as a table, with the measurements behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.bench.readiness.checks import Check, Verdict
from paceline.bench.readiness.measure import Measured
from paceline.bench.report.result import Finding, Result, Table
from paceline.bench.run.charts import contest_figures
from paceline.bench.run.rows import Row
from paceline.bench.run.speculation import OFF
from paceline.bench.run.wording import shown


def readiness_result(model: str, draft: str, checked: Sequence[Check], measured: Measured | None) -> Result:
    """The verdict of each check, and what to do; `measured` is None if the draft could not be loaded."""
    title = f"{model} with --draft {draft}"
    rows = [(check.verdict.value, check.name, check.found) for check in checked]
    tables = [Table(title, ("verdict", "check", "found"), rows, text=("check", "found"))]
    facts: dict[str, Any] = {
        "model": model,
        "draft": draft,
        "ready": not _failed(checked),
        "checks": [asdict(check) | {"verdict": check.verdict.value} for check in checked],
    }
    if measured is None:
        return Result(title, tables, facts, findings=_findings(checked))
    tables.append(_segment_table(measured))
    contest = measured.contest.facts()
    facts |= {
        "threads": contest["threads"],
        "quantization": contest["quantization"],
        "concurrency": measured.concurrency,
        "drafters": [asdict(drafter) for drafter in measured.drafters],
        "measured": contest,
        "short_answers": measured.short.facts(),
        "structured_outputs": None if measured.structured is None else measured.structured.facts(),
    }
    return Result(
        title,
        tables,
        facts,
        findings=_findings(checked),
        figures=contest_figures(measured.contest),
        series=[OFF, measured.method],
    )


def _segment_table(measured: Measured) -> Table:
    """Speedup and acceptance of each segment."""
    once, twice = (measured.rows(measured.contest, times) for times in (1, 2))
    at_once = measured.concurrency
    columns = (
        "segment",
        f"speedup\nat {at_once}",
        f"speedup\nat {2 * at_once}",
        "length",
        "accepted by position, %",
    )

    def cells(segment: str, row: Row) -> Sequence[str]:
        return (
            segment,
            shown(row.speedup_vs_off, ".2f"),
            shown(twice[segment][1].speedup_vs_off, ".2f"),
            shown(row.mean_acceptance_length, ".2f"),
            " ".join(f"{100 * share:.0f}" for share in row.acceptance_per_position[:8]),
        )

    lines = [cells(segment, on) for segment, (_, on) in once.items()]
    return Table("By segment", columns, lines, text=columns[-1:])


def _findings(checked: Sequence[Check]) -> list[Finding]:
    """What to do about each warning and failure, and the whole in one line."""
    advice = [
        Finding(f"{check.verdict.value}: {check.name}. {check.remedy}", check.verdict is not Verdict.FAIL)
        for check in checked
        if check.verdict is not Verdict.PASS
    ]
    counts = Counter(check.verdict for check in checked)
    told = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
    failed = _failed(checked)
    return [*advice, Finding(f"{'Not ready' if failed else 'Ready'}: {told}.", not failed)]


def _failed(checked: Sequence[Check]) -> bool:
    return any(check.verdict is Verdict.FAIL for check in checked)
