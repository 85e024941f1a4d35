"""Decoding whose passes begin before the ones before them were read.

    device   | pass 1    | pass 2    | pass 3    | pass 4
    host     launch 1, 2 | read 1, launch 3      | ...        its work hides behind a pass

While all requests merely go on, a pass needs nothing from the host but room for its keys and values: the
tokens of the pass before it are where it runs, and so is what it drafts with, if it does. A request that ends
leaves rows behind in the pass in flight, which nobody reads. What these write lies behind the request's
committed tokens, in pages of its own, and whoever gets such a page writes to it in a later pass.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.backends.base import AheadDecoder, AheadDraft, AheadOutput, Float32Array, Joining
from paceline.draft.base import Features
from paceline.draft.trees import PLAIN, DraftPlan, DraftTrees
from paceline.engine.drafting import Drafting
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduled
from paceline.engine.verification import chosen_verdict
from paceline.kv.cache import KVCache
from paceline.verify.verdict import Verdict

logger = logging.getLogger(__name__)

DEPTH = 2  # passes in flight when the first of them is read
MOST_DECODERS = 3  # each has buffers of its own; other plans go step by step


@dataclass(frozen=True)
class PassAhead:
    """A pass that ran ahead, when it is read."""

    parts: list[Scheduled]
    verdicts: list[Verdict]
    trees: DraftTrees | None  # the shapes of the drafts; their tokens stayed where they were made
    features: Features | None

    @property
    def num_rows(self) -> int:
        return len(self.parts) + (0 if self.trees is None else self.trees.num_nodes)

    @property
    def attended(self) -> int:
        """Keys of committed tokens that its rows read, summed over the rows. Before requests advance."""
        each = self.num_rows // max(1, len(self.parts))
        return each * sum([part.request.num_computed for part in self.parts])


class RunAhead:
    """The passes in flight, all by one plan."""

    def __init__(
        self, make: Callable[[AheadDraft | None], AheadDecoder | None], drafting: Drafting, kv: KVCache
    ) -> None:
        """`make` gives a decoder that drafts, or one that does not, if there is such."""
        self._make = make
        self._drafting = drafting
        self._kv = kv
        self._decoders: dict[DraftPlan, AheadDecoder | None] = {}
        self._plan = PLAIN
        self._flight: deque[list[Request]] = deque()
        self._known: dict[Request, None] = {}  # to the decoder, in its present state
        self._error: Exception | None = None  # that a pass was lost by when it was to begin
        self.is_offered = True  # until there is not even a decoder that does not draft: steps should not pay

    def holds(self, requests: Sequence[Request]) -> bool:
        """Whether the last pass in flight is of these requests."""
        return bool(self._flight) and self._flight[-1] == requests

    def has_pass(self) -> bool:
        """Whether there is a pass to read. If all its requests have ended, nobody needs to."""
        if self._flight and all(request.finished for request in self._flight[0]):
            self.drop()  # later passes have no others
        return bool(self._flight)

    @property
    def plan(self) -> DraftPlan:
        """By which passes draft."""
        return self._plan

    @property
    def _each(self) -> int:
        """Rows of a request in a pass, which is the most tokens that it gives."""
        return 1 + self._plan.levels

    @property
    def room(self) -> int:
        """Tokens behind those that are known whose places passes write to or have told the next one of."""
        return self._room_behind(len(self._flight) - 1) if self._known else 0

    def _room_behind(self, ahead: int) -> int:
        """The same of a pass behind so many others: its own rows, and those that it tells the next one of."""
        return (ahead + 2) * self._each - 1

    def resting(self, running: Sequence[Request], plans: Sequence[DraftPlan]) -> list[Request]:
        """Those that stay with the decoder while the others, who have just come, compute their prompts.

        None if somebody decodes who is not with it, or if plans have changed.
        """
        known = [
            (request, plan) for request, plan in zip(running, plans, strict=True) if request in self._known
        ]
        others = [request for request in running if request not in self._known]
        decodes = any(request.num_pending == 1 for request in others)
        if self._flight or decodes or any(plan != self._plan for _, plan in known):
            return []
        return [request for request, _ in known]

    def launch(self, requests: Sequence[Request], plan: DraftPlan, depth: int = DEPTH) -> bool:
        """Begin passes over these requests, which all decode and race, as far as there is room for them.

        False if passes by this plan cannot begin now, or never.
        """
        if plan != self._plan:
            if self._flight:
                return False
            self.leave()
            self._plan = plan
        decoder = self._decoder(plan)
        if decoder is None:
            return False
        try:
            while len(self._flight) < depth and self._launch_one(decoder, requests):
                pass
        except Exception as error:  # whoever reads the pass is told
            self._error = error
        return True

    def _decoder(self, plan: DraftPlan) -> AheadDecoder | None:
        if plan.budget and self._decoder(PLAIN) is None:  # who cannot decode cannot draft
            return None
        if plan not in self._decoders and sum(map(bool, self._decoders.values())) < MOST_DECODERS:
            draft = self._drafting.ahead(plan)
            can = plan.budget == 0 or draft is not None
            try:
                self._decoders[plan] = self._make(draft) if can else None
            except Exception as error:  # such as no memory: it only makes steps quicker
                logger.warning("decoding goes step by step, because it cannot run ahead: %s", error)
                self._decoders[plan] = None
            self.is_offered = self._decoders[PLAIN] is not None
        return self._decoders.get(plan)

    def _launch_one(self, decoder: AheadDecoder, requests: Sequence[Request]) -> bool:
        """Whether one more pass was begun."""
        going = [
            request
            for request in requests
            if request.num_output + self._ahead_of(request) < request.max_output
        ]
        if not going or not all(map(self._has_room, going)):
            return False  # what was reserved in vain is let go by the next commit
        new = [request for request in going if request not in self._known]
        if new:
            features = None
            if self._plan.budget:
                features = self._drafting.hand_over(self._plan, new)
                if features is None:
                    return False
            decoder.join(_joining(new, features))
            self._known.update(dict.fromkeys(new))
        self._flight.append(going)
        decoder.launch([request.slot for request in going], self._kv.page_tables)
        return True

    def _ahead_of(self, request: Request) -> int:
        """In how many passes in flight a request is that goes on."""
        return len(self._flight) if request in self._known else 0

    def _has_room(self, request: Request) -> bool:
        """Whether there are pages for another pass."""
        length = len(request.token_ids) + self._room_behind(self._ahead_of(request))
        return self._kv.reserve(request.slot, min(length, _most_tokens(request)))

    def read(self) -> PassAhead:
        """The oldest pass, without those who have ended. Raises what passes in flight were lost by."""
        if self._error is not None:
            raise self._error
        decoder = self._decoders[self._plan]
        assert decoder is not None
        output = decoder.read()
        requests = self._flight.popleft()
        rows = [row for row, request in enumerate(requests) if not request.finished]
        parts = [Scheduled(requests[row], 1, self._plan) for row in rows]
        tokens, counts = output.tokens.tolist(), output.counts.tolist()
        verdicts = [chosen_verdict(tokens[row][: counts[row]], len(requests[row].token_ids)) for row in rows]
        trees = DraftTrees.chains([(0,) * self._plan.levels] * len(parts)) if self._plan.budget else None
        return PassAhead(parts, verdicts, trees, self._features(parts, rows, output))

    def _features(
        self, parts: Sequence[Scheduled], rows: Sequence[int], output: AheadOutput
    ) -> Features | None:
        """Those of the parts, which are these rows of a pass."""
        if output.features is None:
            return None
        contexts = np.array([part.request.num_computed for part in parts], dtype=np.int32)
        offsets = np.arange(len(parts) + 1, dtype=np.int32)
        layers = self._drafting.feature_layers
        return Features(output.features[rows], layers, offsets, contexts, [1] * len(parts))

    def prepare(self, plan: DraftPlan) -> Mapping[int, float]:
        """Have ready what the first passes by this plan would wait for; their seconds, by their requests."""
        decoder = self._decoder(plan)
        return {} if decoder is None else decoder.prepare()

    def leave(self) -> None:
        """Other passes follow: what the decoder knows of requests will be out of date."""
        if self._plan.budget and self._known:
            self._drafting.take_back(self._plan, [request for request in self._known if not request.finished])
        self._known.clear()

    def drop(self) -> list[Request]:
        """Forget the passes in flight; the requests that wait for them."""
        lost = [request for request in self._flight[0] if not request.finished]
        decoder = self._decoders[self._plan]
        assert decoder is not None
        decoder.drop()
        self._flight.clear()
        self._known.clear()
        self._error = None
        return lost


def _most_tokens(request: Request) -> int:
    """How many tokens it may have in all."""
    return len(request.prompt_token_ids) + request.max_output


def _joining(requests: Sequence[Request], features: Float32Array | None) -> Joining:
    return Joining(
        slots=np.array([request.slot for request in requests], dtype=np.int32),
        tokens=np.array([[0, *request.token_ids][-2:] for request in requests], dtype=np.int32),
        lengths=np.array([request.num_computed for request in requests], dtype=np.int32),
        limits=np.array([_most_tokens(request) - 1 for request in requests], dtype=np.int32),
        seeds=np.array([request.seed for request in requests], dtype=np.uint64),
        temperatures=np.array([request.params.temperature for request in requests], dtype=np.float64),
        features=features,
    )
