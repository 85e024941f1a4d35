"""A drafter that knows what the toy model answers."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.backends.async_decoding import DeviceDraft
from paceline.core.features import Features
from paceline.core.request import Request
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.core.verdict import Verdict
from paceline.draft.base import Drafter, DrafterNeeds
from paceline.draft.device import DeviceDrafter
from tests.toy_tokenizer import VOCAB


class ScriptedDrafter(Drafter):
    """Knows each request's true continuation (by prompt) and drafts it right, wrong or partly right."""

    name = "scripted"
    needs = DrafterNeeds(feature_layers=(1,))
    attaches = True
    drafts_on_host = drafts_trees = False

    def __init__(self, truth: dict[tuple[int, ...], list[int]], style: str) -> None:
        self.truth = truth
        self.style = style
        self.seen: dict[Request, int] = {}
        self.forgotten: list[Request] = []
        self.attached: set[Request] = set()

    @property
    def device(self) -> DeviceDrafter | None:
        return self

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        trees: list[tuple[list[int], list[int]]] = []
        for request, plan in zip(requests, plans, strict=True):
            truth = self.truth[tuple(request.prompt_token_ids)][request.num_output :]
            trees.append(getattr(self, f"_{self.style}")(truth, plan.budget, request.num_output))
        return DraftTrees.from_lists(trees)

    def _right(self, truth: list[int], budget: int, step: int) -> tuple[list[int], list[int]]:
        chain = truth[:budget]
        return chain, list(range(-1, len(chain) - 1))

    def _wrong(self, truth: list[int], budget: int, step: int) -> tuple[list[int], list[int]]:
        chain = [(token + 1) % VOCAB for token in truth[:budget]]
        return chain, list(range(-1, len(chain) - 1))

    def _partly(self, truth: list[int], budget: int, step: int) -> tuple[list[int], list[int]]:
        chain = [
            token if depth < step % 3 else (token + 1) % VOCAB for depth, token in enumerate(truth[:budget])
        ]
        return chain, list(range(-1, len(chain) - 1))

    def _tree(self, truth: list[int], budget: int, step: int) -> tuple[list[int], list[int]]:
        """At most levels a wrong sibling before the right one, so that accepted rows are not contiguous."""
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in truth:
            if len(tokens) + 2 > budget:
                break
            wrong_first = (len(tokens) // 2 + step) % 3 != 0
            pair = [(token + 5) % VOCAB, token] if wrong_first else [token, (token + 5) % VOCAB]
            tokens += pair
            parents += [parent, parent]
            parent = len(tokens) - 1 if wrong_first else len(tokens) - 2
        return tokens, parents

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        assert features is not None
        for request, verdict in zip(requests, verdicts, strict=True):
            assert request not in self.forgotten, "observed after it was forgotten"
            assert request.slot >= 0, "observed without its pages"
            self.seen[request] = self.seen.get(request, 0) + len(verdict.tokens)

    def forget(self, request: Request) -> None:
        self.forgotten.append(request)

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        if plan.branching > 1:
            return None
        return DeviceDraft(plan.levels, self, None, self.needs.feature_layers)  # type: ignore[arg-type]

    def prefill_ahead(self, requests: Sequence[Request]) -> None:
        return

    def attach(self, requests: Sequence[Request]) -> bool:
        self.attached.update(requests)
        return True

    def detach(self, requests: Sequence[Request], unsure: int) -> None:
        for request in requests:
            assert request.slot >= 0, "detached without its pages"
            self.attached.remove(request)
