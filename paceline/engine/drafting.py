"""The engine's drafters: asked for trees, shown every pass, and left aside where they fail.

A draft can only make a request faster, so no mistake of a drafter may cost one: if it raises or
gives an unsound tree, the requests at hand go on with plain decoding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from paceline.backends.async_decoding import DeviceDraft
from paceline.constrain.constraint import MOST_FORCED
from paceline.constrain.pruning import Draft, fit_draft
from paceline.core.features import Features
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.stats import DraftCall
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees, Draws
from paceline.core.verdict import Verdict
from paceline.draft.base import DeviceDrafter, Drafter, DrafterNeeds
from paceline.draft.grammar import GrammarDrafter
from paceline.kv.cache import KVCache

logger = logging.getLogger(__name__)

Group = tuple[list[int], DraftTrees]  # parts, and what one drafter proposes for them

FORCED_ONLY = DraftPlan(GrammarDrafter.name, MOST_FORCED)
ROOM_AT_ENDS = 8  # nodes for what is forced at the ends of a draft


class Drafting:
    """Several drafters behind one face, and the one that is always there: of forced tokens."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        vocab_size: int,
        kv: KVCache,
        draft_forced: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafters: dict[str, Drafter] = {GrammarDrafter.name: GrammarDrafter(), **drafters}
        self._vocab_size = vocab_size
        self._draft_forced = draft_forced
        self._clock = clock
        self._calls: list[DraftCall] = []  # since they were last taken
        self.failures = 0  # calls of drafters that raised, since the start
        self.asked: str | None = None  # the drafter being called now; the watchdog logs it
        self.feature_layers = tuple(
            sorted({layer for drafter in self._drafters.values() for layer in drafter.needs.feature_layers})
        )
        for drafter in self._drafters.values():
            drafter.bind(kv)
        kept = [drafter.kept() for drafter in self._drafters.values()]
        self.kept = tuple(own for own in kept if own is not None)  # what passes leave to heads by themselves
        nothing = DraftTrees.merged(1, [([0], DraftTrees.chains([()]))]).kept(np.empty(0, dtype=bool))
        nothing.check([PLAIN], vocab_size)  # so that all of it is compiled before the first step

    def take_calls(self) -> tuple[DraftCall, ...]:
        """Calls of drafters since the last time this was asked."""
        taken, self._calls = tuple(self._calls), []
        return taken

    def prepare(self) -> None:
        """Let drafters have ready what their first drafts would wait for."""
        for drafter in self._drafters.values():
            drafter.prepare()

    def settled(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> list[DraftPlan]:
        """The plans, without those of drafters that failed for their request, with room for forced tokens."""
        return [
            self._with_forced(request, _without_failed(request, plan))
            for request, plan in zip(requests, plans, strict=True)
        ]

    def _with_forced(self, request: Request, plan: DraftPlan) -> DraftPlan:
        """The plan with nodes for what the request's constraint forces, unless the request wants none."""
        constraint = request.sampler.constraint
        if constraint is None or request.undrafted or not self._draft_forced:
            return plan
        run = len(constraint.forced())
        if plan.drafter is None or self._drafters[plan.drafter].only_forced:
            return (plan if plan.budget else FORCED_ONLY).shrunk(run)
        room = run or ROOM_AT_ENDS
        depth = None if plan.depth is None else plan.depth + run
        other = None if plan.otherwise is None else self._with_forced(request, plan.otherwise)
        return replace(plan, budget=plan.budget + room, depth=depth, forced=room, otherwise=other)

    def propose(self, parts: Sequence[Scheduled]) -> tuple[DraftTrees | None, list[Scheduled]]:
        """The trees of all parts, None when nothing is drafted, and the parts with the plans behind them."""
        parts = list(parts)
        groups = self._ask(parts, range(len(parts)))
        if any(part.plan.otherwise is not None for part in parts):
            self._ask_others(parts, groups)
        constrained = [index for index, part in enumerate(parts) if self._is_to_fit(part)]
        if not groups and not constrained:
            return None, parts
        if len(groups) == 1 and len(groups[0][0]) == len(parts):
            merged = groups[0][1]
        else:
            merged = DraftTrees.merged(len(parts), groups)
        return self._fitted(merged, parts, constrained) if constrained else merged, parts

    def _ask(self, parts: Sequence[Scheduled], members: Iterable[int]) -> list[Group]:
        """What drafters propose for these parts, by their plans."""
        own: dict[str, dict[int, DraftPlan]] = {}
        for index in members:
            plan = self._own_plan(parts[index])
            if plan.drafter is not None:
                own.setdefault(plan.drafter, {})[index] = plan
        groups = []
        for name, by_part in own.items():
            requests, plans = [parts[index].request for index in by_part], list(by_part.values())
            start = self._clock()
            with self._guard(name, requests):
                trees, deepest = self._drafters[name].propose(requests, plans), 0
                if trees.num_nodes:
                    trees.check(plans, self._vocab_size)
                    groups.append((list(by_part), trees))
                    deepest = max(trees.sizes())
                levels = min(deepest + 1, max([plan.levels for plan in plans]))
                seconds = self._clock() - start
                self._calls.append(DraftCall(name, len(plans), levels, trees.num_nodes, seconds))
        return groups

    def _ask_others(self, parts: list[Scheduled], groups: list[Group]) -> None:
        """Ask again for parts whose draft is not enough: add the surer drafts, and write down their plans."""
        promised = [0.0] * len(parts)
        for members, trees in groups:
            for index, tokens in zip(members, trees.expected(), strict=True):
                promised[index] = tokens
        second = {
            index: replace(part, plan=_without_failed(part.request, part.plan.second()))
            for index, part in enumerate(parts)
            if promised[index] < part.plan.enough  # not where a drafter has no opinion
        }
        asked = [second.get(index, part) for index, part in enumerate(parts)]
        for members, trees in self._ask(asked, second):
            sizes, expected = trees.sizes(), trees.expected()
            surer = [
                size > 0 and not tokens < promised[index]
                for index, size, tokens in zip(members, sizes, expected, strict=True)
            ]
            for index in compress(members, surer):
                parts[index] = second[index]
            if all(surer) and len(members) == len(parts):
                groups[:] = [(members, trees)]
            else:
                groups.append((members, trees.kept(np.repeat(surer, sizes))))

    def _own_plan(self, part: Scheduled) -> DraftPlan:
        """What the drafter of a part is asked for: what the forced tokens leave of the plan, behind them."""
        plan, constraint = part.plan, part.request.sampler.constraint
        if plan.drafter is None or plan.forced == 0 or constraint is None:
            return plan
        run = constraint.forced()
        own = replace(plan.shrunk(plan.budget - plan.forced), forced=0)
        if own.budget == 0 or not run:
            return own
        depth = None if plan.depth is None else plan.depth - len(run)
        over = (
            len(run) > plan.forced or run[-1] in part.request.ending_ids or (depth is not None and depth < 1)
        )
        if over or not self._drafters[plan.drafter].follows_prefix:
            return PLAIN
        return replace(own, depth=depth, prefix=run)

    def _is_to_fit(self, part: Scheduled) -> bool:
        """Whether a part's draft is still to be held against a constraint."""
        drafter, constraint = part.plan.drafter, part.request.sampler.constraint
        return drafter is not None and constraint is not None and not self._drafters[drafter].only_forced

    def _fitted(self, trees: DraftTrees, parts: Sequence[Scheduled], members: Sequence[int]) -> DraftTrees:
        """The trees, those of these parts along their constraints."""
        rows = [-1] * trees.num_nodes if trees.draws is None else trees.draws.rows.tolist()
        ends = trees.offsets.tolist()
        drafts = [
            Draft(*trees.tree_lists(index), rows[ends[index] : ends[index + 1]], trees.chances_of(index))
            for index in range(len(parts))
        ]
        for index in members:
            plan, constraint = parts[index].plan, parts[index].request.sampler.constraint
            assert constraint is not None
            run = constraint.forced()[: plan.forced]
            drafts[index] = fit_draft(drafts[index], constraint, run, plan.budget, plan.levels)
        fitted = DraftTrees.from_lists(
            [(draft.tokens, draft.parents) for draft in drafts], [draft.chances or () for draft in drafts]
        )
        if trees.draws is None:
            return fitted
        flat = np.array([row for draft in drafts for row in draft.rows], dtype=np.int32)
        return replace(fitted, draws=Draws(trees.draws.draft_probs, flat))

    def observe(
        self, parts: Sequence[Scheduled], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        """Show a pass to every drafter, also to those that did not propose."""
        requests = [part.request for part in parts]
        for name, drafter in self._drafters.items():
            if features is None and drafter.needs.feature_layers:
                continue  # the device has drafted: features are there
            self.asked = name
            try:  # not a guard: this is part of every step, also of those without drafts
                drafter.observe(requests, verdicts, features)
            except Exception as error:
                self.note_failure(name, requests, error)
            self.asked = None

    @property
    def reads_texts(self) -> bool:
        """Whether passes may draft from the requests' own texts on the device."""
        return not self.feature_layers and any(map(_drafts_from_texts, self._drafters.values()))

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        """What passes by this plan draft with on the device; None if they cannot."""
        chain = plan.drafter is not None and plan.branching == 1 and plan.otherwise is None
        if not chain or plan.forced or plan.least_chance:  # by chances the host decides
            return None
        drafter = self._drafters[plan.drafter or ""]
        draft = None if drafter.device is None else drafter.device.device_draft(plan)
        if draft is None or draft.runner is not None:
            return draft
        return draft if _drafts_from_texts(drafter) and not self.feature_layers else None

    def chains(self, plan: DraftPlan, requests: Sequence[Request]) -> list[Sequence[int]]:
        """The chain that a drafter proposes for each request by this plan, which can be empty."""
        useful = [request.max_output - request.num_output - 1 for request in requests]  # one comes anyway
        pairs = zip(requests, useful, strict=True)
        parts = [Scheduled(request, 1, plan.shrunk(max(most, 0))) for request, most in pairs]
        trees, _ = self.propose(parts)
        if trees is None:
            return [()] * len(requests)
        return [trees.tree_lists(index)[0] for index in range(len(requests))]

    def attach(self, plan: DraftPlan, requests: Sequence[Request]) -> bool:
        """Whether the device can draft for these requests now."""
        with self._guard(plan.drafter or "", requests):
            return self._device_drafter(plan).attach(requests)
        return False

    def prefill_ahead(self, plan: DraftPlan, requests: Sequence[Request]) -> None:
        """The device will probably draft for these requests, all of whose tokens a pass is computing."""
        with self._guard(plan.drafter or "", requests):
            self._device_drafter(plan).prefill_ahead(requests)

    def detach(self, plan: DraftPlan, requests: Sequence[Request]) -> None:
        """The device drafts for these requests no longer."""
        with self._guard(plan.drafter or "", requests):
            self._device_drafter(plan).detach(requests, unsure=1 + plan.levels)

    def _device_drafter(self, plan: DraftPlan) -> DeviceDrafter:
        device = self._drafters[plan.drafter or ""].device
        assert device is not None, "it gave a device draft"
        return device

    def forget(self, requests: Sequence[Request]) -> None:
        """Let drafters drop what they keep for requests that have ended."""
        for name, drafter in self._drafters.items():
            for request in requests:
                with self._guard(name, [request]):
                    drafter.forget(request)

    def close(self) -> None:
        """Let drafters write down what is to survive the engine."""
        for name, drafter in self._drafters.items():
            try:
                drafter.close()
            except Exception as error:  # a full disk: the others still have something to write
                logger.warning("what drafter %s keeps could not be written: %s", name, error)

    def _guard(self, name: str, requests: Sequence[Request]) -> _Guard:
        """If a drafter raises in here, these requests are not drafted for by it again."""
        return _Guard(self, name, requests)

    def note_failure(self, name: str, requests: Sequence[Request], error: Exception) -> None:
        """Leave a drafter aside for these requests."""
        for request in requests:
            request.failed_drafters.add(name)
        once = not self.failures  # one traceback is enough
        self.failures += 1
        logger.warning("drafter %s failed, its requests go on without: %s", name, error, exc_info=once)


class _Guard:
    """Catches what a drafter raises. A class, since it is passed several times in every step."""

    __slots__ = ("_drafting", "_name", "_requests")

    def __init__(self, drafting: Drafting, name: str, requests: Sequence[Request]) -> None:
        self._drafting, self._name, self._requests = drafting, name, requests

    def __enter__(self) -> None:
        self._drafting.asked = self._name

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._drafting.asked = None
        if isinstance(error, Exception):  # a drafter is a plug-in: anything may happen in it
            self._drafting.note_failure(self._name, self._requests, error)
            return True
        return False


def _drafts_from_texts(drafter: Drafter) -> bool:
    """Whether a drafter needs nothing but texts, so that the host can draft while passes run."""
    return drafter.device is not None and drafter.needs == DrafterNeeds() and not drafter.only_forced


def _without_failed(request: Request, plan: DraftPlan) -> DraftPlan:
    """The plan, or what is left of it without a drafter that failed for the request."""
    return _without_failed(request, plan.second()) if plan.drafter in request.failed_drafters else plan
