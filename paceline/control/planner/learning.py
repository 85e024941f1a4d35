"""Updates the cost and acceptance models from the drafts of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.control.acceptance.drafter import Key
from paceline.control.acceptance.model import AcceptanceModel
from paceline.control.cost.model import CostModel
from paceline.control.planner.records import DraftRecord, StepRecord

if TYPE_CHECKING:
    from paceline.core.stats import DraftStats, StepStats


def learn_drafts(
    step: StepRecord, stats: StepStats, costs: CostModel, acceptance: AcceptanceModel
) -> dict[Key, int]:
    """Update both models from the drafts of a step. Returns accepted tokens by request."""
    drafts = {(draft.request_id, draft.child): draft for draft in stats.drafts}
    accepted = {
        key: _learn_draft(key, record, drafts.get(key), acceptance)
        for key, record in step.drafts.items()
        if key in stats.asked  # else prefill has left no rows for its draft
    }
    for call in stats.draft_calls:
        if costs.drafts.knows(call.drafter) and not stats.disturbed:
            costs.drafts.observe(call, step.catch_up(call.drafter))
    return accepted


def _learn_draft(key: Key, record: DraftRecord, draft: DraftStats | None, acceptance: AcceptanceModel) -> int:
    """Update the acceptance model from a request's draft. Returns its accepted tokens."""
    segment = record.request.segment
    if (first := record.names[0]) != record.drafter:  # it had nothing, or too little
        model = acceptance.of(first, record.request)
        model.add_draft(key, segment, (), record.length, record.threshold(first))
    if draft is None or not record.confidences:
        return 0
    tried = [node for node, depth in enumerate(record.depths) if depth <= draft.depth]
    path = set(draft.path)
    confidences, accepted = [record.confidences[node] for node in tried], [node in path for node in tried]
    acceptance.of(record.drafter, record.request).observe(key, segment, confidences, accepted)
    return draft.accepted
