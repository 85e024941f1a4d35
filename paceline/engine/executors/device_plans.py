"""DevicePlans: the draft plans that passes on the device can have, each with buffers of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.backends.async_decoding import AsyncDecoder, DeviceDraft
from paceline.core.request import Request
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.drafting import Drafting
from paceline.engine.executors.device_results import TOKEN_MASK

MAX_DRAFTS = 10  # draft plans with buffers on the device; others go through the host
MAX_DRAFT_ROWS = 512  # of a pass with longer drafts than a head's; more have no buffers
# of a pass with trees or with forced tokens: with more rows a GPU multiplies longer than it loads weights
MAX_TREE_ROWS = 128
FORCED_LENGTHS = (7, 3)  # of chains of forced tokens: few, as each has buffers; the longest that fits
# Requests up to which forced tokens are drafted if they double the tokens of a pass; with more, they must
# triple them: where doubling was enough, 16 constrained requests got 13,497 tokens/s on an H200, and 14,307
# without.
FEW_FORCED = 4


class DevicePlans:
    """Says which plans the device has buffers for, and makes them when they are first asked for."""

    def __init__(self, decoder: AsyncDecoder | None, drafting: Drafting) -> None:
        self._decoder = decoder
        self._drafting = drafting
        self._masks = decoder is not None and bool(decoder.supported_sampling & TOKEN_MASK)
        self._drafts: dict[DraftPlan, DeviceDraft | None] = {}  # None: there is no memory for it

    def draft(self, plan: DraftPlan) -> DeviceDraft | None:
        """How the decoder drafts by this plan; None if it cannot."""
        if plan in self._drafts:
            return self._drafts[plan]
        if self._decoder is None or not plan.budget or len(self._drafts) >= MAX_DRAFTS:
            return None
        draft = self._drafting.on_device.draft(plan)
        if draft is None or (draft.reads_texts and not self._decoder.supports_lookup):
            return None
        is_longer_than_a_heads = (
            draft.nodes or draft.from_texts or (draft.network_length or draft.length) < draft.length
        )
        if is_longer_than_a_heads:
            is_forced = self._drafting.only_forced(plan)
            max_rows = MAX_TREE_ROWS if draft.nodes or is_forced else MAX_DRAFT_ROWS
            most = max(1, max_rows // (1 + plan.nodes))
            draft = replace(draft, max_requests=min(most, draft.max_requests or most))
            if is_forced and not self._decoder.has_room(draft):  # no request has asked for it
                draft = None
        self._drafts[plan] = draft
        return draft

    def offers(self, plan: DraftPlan) -> bool:
        """Whether passes by this plan can run on the device."""
        return self._decoder is not None and (plan.budget == 0 or self.draft(plan) is not None)

    def fitting(self, plan: DraftPlan, num_requests: int) -> DraftPlan:
        """This plan; if its buffers are too small for these requests, a tree's chain, or the plain one."""
        draft = self.draft(plan)
        if draft is None or draft.max_requests is None or num_requests <= draft.max_requests:
            return plan
        chain = plan.as_chain() if plan.branching > 1 else PLAIN
        return chain if self.offers(chain) else PLAIN

    @property
    def prepared_forced(self) -> Sequence[DraftPlan]:
        """The plans of forced tokens that passes are prepared for at start-up: the longest chains, if any.

        Shorter ones, for more requests, are prepared when they are first needed.
        """
        plan = self._drafting.forced_plan.shrunk(FORCED_LENGTHS[0])
        return [plan] if plan.budget and self._masks and self.offers(plan) else []

    def has_vote(self, request: Request) -> bool:
        """Whether the plan that a request wants counts when the plan of its pass is chosen: not if it wants
        no drafts, or only forced tokens, for which `choose_forced` has other plans."""
        plan = request.plan
        return plan is None or (plan.budget > 0 and not self._drafting.only_forced(plan))

    def choose_forced(
        self, requests: Sequence[Request], count_coming: Callable[[], Mapping[Request, int]]
    ) -> DraftPlan:
        """The plan of a pass that would otherwise be plain: chains of tokens that grammars force, or plain.

        The chains must double the tokens of the pass; triple them, if it has more than FEW_FORCED requests.
        They have at most MAX_TREE_ROWS rows: with so few, a pass takes no longer than a plain one.
        `count_coming` counts the tokens that passes in flight will sample.
        """
        constrained = [request for request in requests if request.sampling.constraint is not None]
        if not constrained:
            return PLAIN
        length = MAX_TREE_ROWS // len(requests) - 1
        length = next((fixed for fixed in FORCED_LENGTHS if fixed <= length), 0)
        plan = self._drafting.forced_plan.shrunk(length)
        if not plan.budget:
            return PLAIN
        drafted, coming = 0, count_coming()
        for request in constrained:
            run = self._drafting.num_forced(request)
            drafted += min(max(run - coming[request], 0), length)
        enough = len(requests) * (1 if len(requests) <= FEW_FORCED else 2)
        return plan if drafted >= enough and self.offers(plan) else PLAIN
