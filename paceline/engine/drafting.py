"""Drafting: the engine's drafters behind one interface.

A drafter that raises or returns an invalid tree fails no request: see DrafterFaults.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from paceline.constrain.constraint import MAX_FORCED
from paceline.core.features import Features
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.stats import DraftCall
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.core.verdict import Verdict
from paceline.draft.base import Drafter, DrafterNeeds, UnboundDrafter
from paceline.draft.grammar import GrammarDrafter
from paceline.engine.constrained_drafts import fit_trees, plan_after_forced
from paceline.engine.device_drafting import DeviceDrafting
from paceline.engine.drafter_faults import DrafterFaults
from paceline.errors import ConfigError

logger = logging.getLogger(__name__)

Group = tuple[list[int], DraftTrees]  # indices of parts, and one drafter's trees for them

FORCED_ONLY = DraftPlan(GrammarDrafter.name, MAX_FORCED)
FORCED_AFTER_PATH = 8  # nodes reserved for tokens that a constraint forces after a path of the draft


class Drafting:
    """All drafters of an engine, with the one that is always there: the drafter of forced tokens."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        vocab_size: int,
        draft_forced: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafters: dict[str, Drafter] = {GrammarDrafter.name: GrammarDrafter(), **drafters}
        self._vocab_size = vocab_size
        self._draft_forced = draft_forced
        self._clock = clock
        self._calls: list[DraftCall] = []  # since the last take_calls
        self.faults = DrafterFaults()
        self.on_device = DeviceDrafting(self._drafters, self.faults)
        self.feature_layers = tuple(
            sorted({layer for drafter in self._drafters.values() for layer in drafter.needs.feature_layers})
        )
        self._heads = {
            name: drafter.head for name, drafter in self._drafters.items() if drafter.head is not None
        }
        kept = [head.kept_features for head in self._heads.values()]
        # what passes write to the heads' pools
        self.kept_features = tuple(features for features in kept if features is not None)
        nothing = DraftTrees.merged(1, [([0], DraftTrees.chains([()]))]).kept(np.empty(0, dtype=bool))
        nothing.check([PLAIN], vocab_size)  # compile now, not in the first step

    def take_calls(self) -> tuple[DraftCall, ...]:
        """The calls of drafters since the last time."""
        calls, self._calls = tuple(self._calls), []
        return calls

    def prepare(self) -> None:
        """Warm up all heads."""
        for head in self._heads.values():
            head.prepare()

    def without_failed(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> list[DraftPlan]:
        """The plans without drafters that failed for their request."""
        return [
            _without_failed(request, plan) if request.failed_drafters else plan
            for request, plan in zip(requests, plans, strict=True)
        ]

    def with_forced(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> list[DraftPlan]:
        """The plans of a host pass: with room for forced tokens."""
        return [
            plan if request.sampling.constraint is None else self._with_forced(request, plan)
            for request, plan in zip(requests, plans, strict=True)
        ]

    def num_forced(self, request: Request) -> int:
        """The tokens that the request's constraint forces next and that may be drafted."""
        constraint = request.sampling.constraint
        if constraint is None or request.undrafted or not self._draft_forced:
            return 0
        return len(constraint.forced())

    def only_forced(self, plan: DraftPlan) -> bool:
        """Whether a plan drafts nothing but forced tokens."""
        drafter = self._drafters.get(plan.drafter or "")
        return drafter is not None and drafter.only_forced

    @property
    def forced_plan(self) -> DraftPlan:
        """Drafts forced tokens, as many as may be; plain if they are not drafted."""
        return FORCED_ONLY if self._draft_forced else PLAIN

    def _with_forced(self, request: Request, plan: DraftPlan) -> DraftPlan:
        """The plan with nodes for the tokens that the constraint forces, unless drafting is off."""
        constraint = request.sampling.constraint
        if constraint is None or request.undrafted or not self._draft_forced:
            return plan
        run = len(constraint.forced())
        if plan.drafter is None or self.only_forced(plan):
            return (plan if plan.budget else FORCED_ONLY).shrunk(run)
        room = run or FORCED_AFTER_PATH
        depth = None if plan.depth is None else plan.depth + run
        other = None if plan.otherwise is None else self._with_forced(request, plan.otherwise)
        return replace(plan, budget=plan.budget + room, depth=depth, forced=room, otherwise=other)

    def propose(self, parts: Sequence[Scheduled]) -> tuple[DraftTrees | None, list[Scheduled]]:
        """The trees of all parts (None: nothing was drafted), and the parts with the plans in use."""
        parts = list(parts)
        groups = self._propose(parts, range(len(parts)))
        if any(part.plan.otherwise is not None for part in parts):
            self._add_second_drafts(parts, groups)
        constrained = [index for index, part in enumerate(parts) if self._must_fit(part)]
        if not groups and not constrained:
            return None, parts
        if len(groups) == 1 and len(groups[0][0]) == len(parts):
            merged = groups[0][1]
        else:
            merged = DraftTrees.merged(len(parts), groups)
        return fit_trees(merged, parts, constrained) if constrained else merged, parts

    def _propose(self, parts: Sequence[Scheduled], members: Iterable[int]) -> list[Group]:
        """The trees that drafters propose for these parts, one group per drafter."""
        by_drafter: dict[str, dict[int, DraftPlan]] = {}
        for index in members:
            name = parts[index].plan.drafter
            if name is None:
                continue
            plan = plan_after_forced(parts[index], self._drafters[name])
            if plan.budget:
                by_drafter.setdefault(name, {})[index] = plan
        groups = []
        for name, by_part in by_drafter.items():
            requests, plans = [parts[index].request for index in by_part], list(by_part.values())
            start = self._clock()
            with self.faults.isolated(name, requests):
                trees, deepest = self._drafters[name].propose(requests, plans), 0
                if trees.num_nodes:
                    trees.check(plans, self._vocab_size)
                    groups.append((list(by_part), trees))
                    deepest = max(trees.sizes())
                levels = min(deepest + 1, max([plan.levels for plan in plans]))
                seconds = self._clock() - start
                self._calls.append(DraftCall(name, len(plans), levels, trees.num_nodes, seconds))
        return groups

    def _add_second_drafts(self, parts: list[Scheduled], groups: list[Group]) -> None:
        """The cascade: where a draft expects too few tokens, ask the `otherwise` drafter too.

        Where its draft expects more tokens, it is added to `groups` and its plan replaces the part's.
        """
        expected_tokens = [0.0] * len(parts)
        for members, trees in groups:
            for index, tokens in zip(members, trees.expected(), strict=True):
                expected_tokens[index] = tokens
        second = {
            index: replace(part, plan=_without_failed(part.request, part.plan.second()))
            for index, part in enumerate(parts)
            if expected_tokens[index] < part.plan.enough  # false where the expectation is unknown (NaN)
        }
        parts_to_ask = [second.get(index, part) for index, part in enumerate(parts)]
        for members, trees in self._propose(parts_to_ask, second):
            sizes, expected = trees.sizes(), trees.expected()
            is_better = [
                size > 0 and not tokens < expected_tokens[index]
                for index, size, tokens in zip(members, sizes, expected, strict=True)
            ]
            for index in compress(members, is_better):
                parts[index] = second[index]
            if all(is_better) and len(members) == len(parts):
                groups[:] = [(members, trees)]
            else:
                groups.append((members, trees.kept(np.repeat(is_better, sizes))))

    def _must_fit(self, part: Scheduled) -> bool:
        """Whether a part's draft has to be fitted to a constraint."""
        drafter, constraint = part.plan.drafter, part.request.sampling.constraint
        return drafter is not None and constraint is not None and not self._drafters[drafter].only_forced

    def observe(
        self, parts: Sequence[Scheduled], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        """Let every drafter observe a pass, also those that did not propose."""
        requests = [part.request for part in parts]
        for name, drafter in self._drafters.items():
            if features is None and drafter.needs.feature_layers:
                continue  # a device pass: the features stay on the device
            with self.faults.isolated(name, requests):
                drafter.observe(requests, verdicts, features)

    def writes_target_pages(self, plan: DraftPlan) -> bool:
        """Whether a drafter of this plan writes to the target's pages: no pass may be in flight then."""
        drafter = self._drafters.get(plan.drafter or "")
        if drafter is not None and drafter.needs.target_pages:
            return True
        return plan.otherwise is not None and self.writes_target_pages(plan.otherwise)

    def only_reads_texts(self, plan: DraftPlan) -> bool:
        """Whether all drafters of this plan, of its `otherwise` too, need nothing but the requests' texts."""
        if plan.drafter is not None and self._drafters[plan.drafter].needs != DrafterNeeds():
            return False
        return plan.otherwise is None or self.only_reads_texts(plan.otherwise)

    def chains(self, plans: Sequence[DraftPlan], requests: Sequence[Request]) -> list[Sequence[int]]:
        """The chain that its plan's drafter proposes for each request; may be empty."""
        # one token fewer than the request may still have: the bonus token comes on top
        useful = [request.max_output - request.num_output - 1 for request in requests]
        shrunk = [plan.shrunk(max(length, 0)) for plan, length in zip(plans, useful, strict=True)]
        parts = [
            Scheduled(request, 1, self._with_forced(request, plan) if plan.budget else plan)
            for request, plan in zip(requests, shrunk, strict=True)
        ]
        trees, _ = self.propose(parts)
        if trees is None:
            return [()] * len(requests)
        return [trees.tree_lists(index)[0] for index in range(len(requests))]

    def forget(self, requests: Sequence[Request]) -> None:
        """Let drafters drop their state of requests that have ended."""
        for name, drafter in self._drafters.items():
            for request in requests:
                with self.faults.isolated(name, [request]):
                    drafter.forget(request)

    def replace_head(self, name: str, other: UnboundDrafter) -> None:
        """Give the named drafter the head of another drafter; ConfigError if it does not fit."""
        if name not in self._drafters:
            raise ConfigError(f"no drafter {name} is loaded; there are {', '.join(self._drafters)}.")
        if name not in self._heads:
            raise ConfigError(
                f"the method {name} has no head that can be replaced while requests run. Use eagle3, eagle, "
                "dflash or dspark, or restart with the other head."
            )
        if other.name != (method := self._drafters[name].name):
            raise ConfigError(
                f"a {method} head cannot be replaced by one of {other.name}: restart with the other head."
            )
        self._heads[name].replace(other.head)

    def close(self) -> None:
        """Let drafters save what must survive the engine."""
        for name, drafter in self._drafters.items():
            try:
                if drafter.memory is not None:
                    drafter.memory.save()
            except Exception as error:  # for example a full disk: the others are still closed
                logger.warning("drafter %s could not save its state: %s", name, error)


def _without_failed(request: Request, plan: DraftPlan) -> DraftPlan:
    """The plan without its drafter or its `otherwise` drafter, if that has failed for the request."""
    if plan.drafter in request.failed_drafters:
        return _without_failed(request, plan.second())
    if plan.otherwise is None or plan.otherwise.drafter not in request.failed_drafters:
        return plan
    return replace(plan, otherwise=None, enough=0.0)
