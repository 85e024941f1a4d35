"""Drafting: the engine's drafters behind one interface, isolated from the engine.

Drafting only makes requests faster, so no fault of a drafter may fail one: if it raises or returns an invalid
tree, its requests continue with plain decoding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from paceline.backends.async_decoding import DeviceDraft
from paceline.constrain.constraint import MAX_FORCED
from paceline.constrain.pruning import Draft, fit_draft
from paceline.core.features import Features
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.stats import DraftCall
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees, Draws
from paceline.core.verdict import Verdict
from paceline.draft.base import Drafter, DrafterNeeds, UnboundDrafter, drafts_on_device
from paceline.draft.device import DeviceDrafter
from paceline.draft.grammar import GrammarDrafter
from paceline.errors import ConfigError

logger = logging.getLogger(__name__)

Group = tuple[list[int], DraftTrees]  # indices of parts, and one drafter's trees for them

FORCED_ONLY = DraftPlan(GrammarDrafter.name, MAX_FORCED)
# Tokens of a match from which on a device pass prefers the looked-up tokens to a head's chain. After matches
# of 3 or 4, 1.2 to 1.5 of 5 looked-up tokens were accepted in SmolLM2's math and tool calls, and 1.7 or more
# of the head's (docs/lab/2026-11-18-auto-on-gpu.md).
MIN_MATCH_BESIDE_HEAD = 5
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
        self.failures = 0  # calls of drafters that raised, since the start
        self.active: str | None = None  # the drafter that is being called now, for the watchdog
        self.feature_layers = tuple(
            sorted({layer for drafter in self._drafters.values() for layer in drafter.needs.feature_layers})
        )
        self._on_device = drafts_on_device(self._drafters)
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
        groups = self._ask(parts, range(len(parts)))
        if any(part.plan.otherwise is not None for part in parts):
            self._ask_others(parts, groups)
        constrained = [index for index, part in enumerate(parts) if self._must_fit(part)]
        if not groups and not constrained:
            return None, parts
        if len(groups) == 1 and len(groups[0][0]) == len(parts):
            merged = groups[0][1]
        else:
            merged = DraftTrees.merged(len(parts), groups)
        return self._fitted(merged, parts, constrained) if constrained else merged, parts

    def _ask(self, parts: Sequence[Scheduled], members: Iterable[int]) -> list[Group]:
        """The trees that drafters propose for these parts, one group per drafter."""
        by_drafter: dict[str, dict[int, DraftPlan]] = {}
        for index in members:
            plan = self._drafter_plan(parts[index])
            if plan.drafter is not None:
                by_drafter.setdefault(plan.drafter, {})[index] = plan
        groups = []
        for name, by_part in by_drafter.items():
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
        for members, trees in self._ask(parts_to_ask, second):
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

    def _drafter_plan(self, part: Scheduled) -> DraftPlan:
        """The plan that the drafter of a part gets: it starts after the forced tokens, and has the nodes that
        they leave."""
        plan, constraint = part.plan, part.request.sampling.constraint
        if plan.drafter is None or plan.forced == 0 or constraint is None:
            return plan
        run = constraint.forced()
        remaining = replace(plan.shrunk(plan.budget - plan.forced), forced=0)
        if remaining.budget == 0 or not run:
            return remaining
        depth = None if plan.depth is None else plan.depth - len(run)
        over = (
            len(run) > plan.forced or run[-1] in part.request.ending_ids or (depth is not None and depth < 1)
        )
        if over or not self._drafters[plan.drafter].follows_prefix:
            return PLAIN
        return replace(remaining, depth=depth, prefix=run)

    def _must_fit(self, part: Scheduled) -> bool:
        """Whether a part's draft has to be fitted to a constraint."""
        drafter, constraint = part.plan.drafter, part.request.sampling.constraint
        return drafter is not None and constraint is not None and not self._drafters[drafter].only_forced

    def _fitted(self, trees: DraftTrees, parts: Sequence[Scheduled], members: Sequence[int]) -> DraftTrees:
        """The trees, with those of the parts `members` fitted to their constraints."""
        rows = [-1] * trees.num_nodes if trees.draws is None else trees.draws.rows.tolist()
        ends = trees.offsets.tolist()
        drafts = [
            Draft(
                *trees.tree_lists(index),
                rows[ends[index] : ends[index + 1]],
                trees.chances_of(index),
                trees.forced_of(index),
            )
            for index in range(len(parts))
        ]
        for index in members:
            plan, constraint = parts[index].plan, parts[index].request.sampling.constraint
            assert constraint is not None
            run = constraint.forced()[: plan.forced]
            drafts[index] = fit_draft(drafts[index], constraint, run, plan.budget, plan.levels)
        fitted = DraftTrees.from_lists(
            [(draft.tokens, draft.parents) for draft in drafts], [draft.chances or () for draft in drafts]
        )
        forced = np.array([each for draft in drafts for each in draft.forced], dtype=bool)
        fitted = replace(fitted, forced=forced)
        if trees.draws is None:
            return fitted
        flat = np.array([row for draft in drafts for row in draft.rows], dtype=np.int32)
        return replace(fitted, draws=Draws(trees.draws.draft_probs, flat))

    def observe(
        self, parts: Sequence[Scheduled], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        """Let every drafter observe a pass, also those that did not propose."""
        requests = [part.request for part in parts]
        for name, drafter in self._drafters.items():
            if features is None and drafter.needs.feature_layers:
                continue  # a device pass: the features stay on the device
            self.active = name
            try:  # not _guard, for speed: this is part of every step, also without drafts
                drafter.observe(requests, verdicts, features)
            except Exception as error:
                self.note_failure(name, requests, error)
            self.active = None

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

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        """How device passes draft by this plan; None if they cannot.

        A cascade is a lookup, and a head where nothing is found. The head computes accepted tokens again, so
        it does not matter which of the two has drafted them. If the head drafts trees, a lookup replaces
        their first path.
        """
        # only the host truncates drafts by their estimated acceptance
        if plan.forced or plan.least_chance:
            return None
        device = self._on_device.get(plan.drafter or "")
        if plan.otherwise is None or device is None:
            return None if device is None else device.device_draft(plan)
        draft, head = device.device_draft(replace(plan, branching=1)), self.device_draft(plan.second())
        look_up = None if draft is None else draft.look_up
        if head is None or head.runner is None or look_up is None or draft is None or draft.host_tokens:
            return None
        if head.branching != plan.branching or (head.nodes and head.length < plan.levels):
            return None
        shortest = min(max(look_up.shortest, MIN_MATCH_BESIDE_HEAD), look_up.longest)
        found = replace(look_up, shortest=shortest)
        return replace(head, length=plan.levels, network_length=head.length, look_up=found)

    def head_of(self, plan: DraftPlan) -> str | None:
        """The drafter of this plan, or of its `otherwise`, that must be attached; None if there is none."""
        device = self._on_device.get(plan.drafter or "")
        if device is not None and device.attaches:
            return plan.drafter
        return None if plan.otherwise is None else self.head_of(plan.otherwise)

    def chains(self, plans: Sequence[DraftPlan], requests: Sequence[Request]) -> list[Sequence[int]]:
        """The chain that its plan's drafter proposes for each request; may be empty."""
        useful = [
            request.max_output - request.num_output - 1 for request in requests
        ]  # the last is the bonus
        shrunk = [plan.shrunk(max(length, 0)) for plan, length in zip(plans, useful, strict=True)]
        parts = [
            Scheduled(request, 1, self._with_forced(request, own) if own.budget else own)
            for request, own in zip(requests, shrunk, strict=True)
        ]
        trees, _ = self.propose(parts)
        if trees is None:
            return [()] * len(requests)
        return [trees.tree_lists(index)[0] for index in range(len(requests))]

    def attach(self, plan: DraftPlan, requests: Sequence[Request]) -> bool:
        """Whether the device can draft for these requests from now on."""
        with self._guard(self.head_of(plan) or "", requests):
            return self._device_head(plan).attach(requests)
        return False

    def catch_up_seconds(self, plan: DraftPlan) -> float | None:
        """Seconds per token until the plan's head can draft on the device; None: not measured."""
        head = self.head_of(plan)
        return None if head is None else self._on_device[head].catch_up_seconds

    def prefill_ahead(self, plan: DraftPlan, requests: Sequence[Request]) -> None:
        """Let the plan's head prefill these requests after the pass that prefills them now."""
        with self._guard(self.head_of(plan) or "", requests):
            self._device_head(plan).prefill_ahead(requests)

    def detach(self, plan: DraftPlan, requests: Sequence[Request]) -> None:
        """Return these requests from the device to the host."""
        with self._guard(self.head_of(plan) or "", requests):
            self._device_head(plan).detach(requests, unsure=1 + plan.levels)

    def _device_head(self, plan: DraftPlan) -> DeviceDrafter:
        head = self.head_of(plan)
        assert head is not None, "only heads are attached"
        return self._on_device[head]

    def forget(self, requests: Sequence[Request]) -> None:
        """Let drafters drop their state of requests that have ended."""
        for name, drafter in self._drafters.items():
            for request in requests:
                with self._guard(name, [request]):
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
        memories = {name: drafter.memory for name, drafter in self._drafters.items()}
        for name, memory in memories.items():
            try:
                if memory is not None:
                    memory.save()
            except Exception as error:  # for example a full disk: the others are still closed
                logger.warning("drafter %s could not save its state: %s", name, error)

    def _guard(self, name: str, requests: Sequence[Request]) -> _Guard:
        """A context in which a drafter may raise: it then never drafts for these requests again."""
        return _Guard(self, name, requests)

    def note_failure(self, name: str, requests: Sequence[Request], error: Exception) -> None:
        """Exclude a drafter for these requests, and log why."""
        for request in requests:
            request.failed_drafters.add(name)
        once = not self.failures  # one traceback is enough
        self.failures += 1
        logger.warning("drafter %s failed, its requests continue without it: %s", name, error, exc_info=once)


class _Guard:
    """Catches what a drafter raises. A class and not a generator, for speed: every step enters it often."""

    __slots__ = ("_drafting", "_name", "_requests")

    def __init__(self, drafting: Drafting, name: str, requests: Sequence[Request]) -> None:
        self._drafting, self._name, self._requests = drafting, name, requests

    def __enter__(self) -> None:
        self._drafting.active = self._name

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._drafting.active = None
        if isinstance(error, Exception):  # drafters are plug-ins: they may raise anything
            self._drafting.note_failure(self._name, self._requests, error)
            return True
        return False


def _without_failed(request: Request, plan: DraftPlan) -> DraftPlan:
    """The plan without its drafter or its `otherwise` drafter, if that has failed for the request."""
    if plan.drafter in request.failed_drafters:
        return _without_failed(request, plan.second())
    if plan.otherwise is None or plan.otherwise.drafter not in request.failed_drafters:
        return plan
    return replace(plan, otherwise=None, enough=0.0)
