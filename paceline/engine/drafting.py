"""The engine's drafters: asked for trees, shown every pass, and left aside where they fail.

A draft can only make a request faster, so no mistake of a drafter may cost one: if it raises or
gives an unsound tree, the requests at hand go on with plain decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from paceline.backends.base import ForwardBatch, ForwardOutput
from paceline.draft.base import Drafter, Features
from paceline.draft.trees import PLAIN, DraftPlan, DraftTrees
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduled
from paceline.engine.stats import DraftFacts
from paceline.kv.cache import KVCache
from paceline.verify.verdict import Verdict

logger = logging.getLogger(__name__)


class Drafting:
    """Several drafters behind one face."""

    def __init__(self, drafters: Mapping[str, Drafter], vocab_size: int, kv: KVCache) -> None:
        self._drafters = dict(drafters)
        self._vocab_size = vocab_size
        self.failures = 0  # calls of drafters that raised
        self.feature_layers = tuple(
            sorted({layer for drafter in self._drafters.values() for layer in drafter.needs.feature_layers})
        )
        for drafter in self._drafters.values():
            drafter.bind(kv)

    def sound(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> Sequence[DraftPlan]:
        """The plans, without those of drafters that failed for their request."""
        if not self.failures:
            return plans
        return [
            PLAIN if plan.drafter in request.failed_drafters else plan
            for request, plan in zip(requests, plans, strict=True)
        ]

    def propose(self, parts: Sequence[Scheduled]) -> DraftTrees | None:
        """The trees of all parts; None when nothing is drafted."""
        groups: dict[str, list[int]] = {}
        for index, part in enumerate(parts):
            if part.plan.drafter is not None:
                groups.setdefault(part.plan.drafter, []).append(index)
        proposed: list[tuple[list[int], DraftTrees]] = []
        for name, members in groups.items():
            requests = [parts[index].request for index in members]
            plans = [parts[index].plan for index in members]
            with self._guard(name, requests):
                trees = self._drafters[name].propose(requests, plans)
                trees.check(plans, self._vocab_size)
                if trees.num_nodes:
                    proposed.append((members, trees))
        if not proposed:
            return None
        if len(proposed) == 1 and len(proposed[0][0]) == len(parts):
            return proposed[0][1]
        return DraftTrees.merged(len(parts), proposed)

    def observe(
        self,
        requests: Sequence[Request],
        verdicts: Sequence[Verdict],
        batch: ForwardBatch,
        output: ForwardOutput,
    ) -> None:
        """Show a pass to every drafter, also to those that did not propose."""
        features = None if output.features is None else Features(output.features, batch.row_offsets)
        for name, drafter in self._drafters.items():
            with self._guard(name, requests):
                drafter.observe(requests, verdicts, features)

    def forget(self, requests: Sequence[Request]) -> None:
        """Let drafters drop what they keep for requests that have ended."""
        for name, drafter in self._drafters.items():
            for request in requests:
                with self._guard(name, [request]):
                    drafter.forget(request)

    def close(self) -> None:
        """Let drafters write down what is to survive the engine."""
        for drafter in self._drafters.values():
            drafter.close()

    @contextmanager
    def _guard(self, name: str, requests: Sequence[Request]) -> Iterator[None]:
        """If a drafter raises in here, these requests are not drafted for by it again."""
        try:
            yield
        except Exception as error:  # a drafter is a plug-in: anything may happen in it
            for request in requests:
                request.failed_drafters.add(name)
            once = not self.failures  # one traceback is enough
            self.failures += 1
            logger.warning("drafter %s failed, its requests go on without: %s", name, error, exc_info=once)


def draft_facts(part: Scheduled, parents: Sequence[int], accepted: int, num_tokens: int) -> DraftFacts:
    """What became of the draft of one part that gained `num_tokens` tokens."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    depth = max(depths)
    if part.request.finished:  # nothing below its last token was tried
        depth = min(depth, num_tokens)
    return DraftFacts(
        request_id=part.request.request_id,
        segment=part.request.segment,
        drafter=part.plan.drafter or "",
        nodes=len(parents),
        depth=depth,
        accepted=min(accepted, num_tokens),
    )
