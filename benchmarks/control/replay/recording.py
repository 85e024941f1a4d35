"""Records answers of a real model, and which of a head's guesses would have been right at every position.

The answers are decoded twice. The second time the head follows each of them: at every position it guesses
the next token, then the one after the right token, and so on, and the rank of the right token among its
guesses is kept. What a chain or a tree of any fixed shape would have brought follows from these ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.bench.loading import bench_config
from paceline.bench.run.contest import SpeculationOptions, tasks_of
from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.run.speculation import OFF
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.profiles import closed
from paceline.bench.traffic.workloads import Workload, load_workload
from paceline.build import build_engine, load_model
from paceline.core.arrays import Float32Array
from paceline.core.request import Request
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.growth import ChosenTree
from paceline.draft.heads.eagle import Eagle3Drafter
from paceline.draft.methods import METHODS
from paceline.engine.engine import Engine

HEAD = Eagle3Drafter.name
DEPTH, BRANCHING = 7, 4  # levels that the head follows an answer, and its guesses in each
TEMPERATURES = (0.0, 0.8)
AT_ONCE = 16  # requests
MAX_PROMPTS = 64  # of a workload


@dataclass(frozen=True)
class RecordedAnswer:
    """A prompt and its answer."""

    prompt: list[int]
    tokens: list[int]
    ended: bool  # by itself, not at max_tokens
    ranks: list[str]  # [tokens] at each position, of the next tokens, up to one that the head did not guess


Recording = Mapping[tuple[str, float], Sequence[RecordedAnswer]]  # by workload and temperature


class FollowedTree(ChosenTree):
    """A path that follows a known answer, with the rank of each token among the head's guesses."""

    wanted: Sequence[int] = ()  # the tokens that come next
    ranks = ""

    def grow(self, logits: Float32Array, confidences: Float32Array | None = None) -> None:
        node = len(self.tokens) - 1
        guesses = [token for token, _ in self._candidates(node, logits[0])]
        right = self.wanted[len(self.tokens)]
        self.frontier = []
        if right in guesses:
            self.ranks += str(guesses.index(right))
            self._scores.append(0.0)
            added = self._add(node, right)
            if len(self.tokens) < min(DEPTH, len(self.wanted), self.context.room):
                self.frontier = [added]


class FollowingHead(Eagle3Drafter):
    """A head that guesses along known answers, and drafts nothing."""

    def follow(self, answers: Mapping[int, Sequence[int]]) -> dict[int, list[str]]:
        """The ranks at each position of the answers to the requests with these seeds, filled as they run."""
        self._answers = answers
        self._ranks = {seed: [""] * len(tokens) for seed, tokens in answers.items()}
        return self._ranks

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        plan = DraftPlan(HEAD, DEPTH, BRANCHING, DEPTH)
        trees = []
        for request, context in zip(
            requests, self._pages.open(requests, [own.budget for own in plans]), strict=True
        ):
            wanted = self._answers[request.seed][request.num_output :][:DEPTH]
            if context is not None and wanted:
                tree = FollowedTree(context, plan, self._scoring, coupled=True)
                tree.wanted = wanted
                trees.append((request, tree))
        self._grown([tree for _, tree in trees])
        for request, tree in trees:
            self._ranks[request.seed][request.num_output] = tree.ranks
        return DraftTrees.chains([()] * len(requests))


def record(
    path: Path,
    model_name: str,
    workloads: Sequence[str],
    max_tokens: int,
    threads: int | None,
    on_turn: OnTurn,
) -> None:
    """Write the answers to the prompts of these workloads, greedy and sampled, as JSON lines.

    The file appears when all are in it: part of a recording would be replayed as a whole one.
    """
    loaded = [load_workload(name, MAX_PROMPTS, max_tokens) for name in workloads]
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        for line in recorded_lines(model_name, loaded, threads, on_turn):
            file.write(json.dumps(line) + "\n")
            file.flush()
    unfinished.replace(path)


def recorded_lines(
    model_name: str, workloads: Sequence[Workload], threads: int | None, on_turn: OnTurn
) -> Iterator[dict[str, Any]]:
    """The lines of a recording, as the answers are made."""

    def config(draft: Any) -> Any:
        return bench_config(model_name, "auto", threads, AT_ONCE, draft)

    model = load_model(config(OFF))
    plain = build_engine(config(OFF), model).engine
    with _following_head():
        # its pages must have room for the tokens that the head follows an answer
        following = build_engine(config({"method": HEAD, "num_speculative_tokens": DEPTH}), model)
    head = following.drafters[HEAD]
    assert isinstance(head, FollowingHead)
    for workload in workloads:
        for temperature in TEMPERATURES:
            how = SpeculationOptions((workload,), {}, temperature=temperature, constrain=False)
            tasks = tasks_of(workload, model, how)
            answers = dict(enumerate(_answers(plain, tasks)))
            ranks = head.follow(answers)
            assert answers == dict(enumerate(_answers(following.engine, tasks)))
            for number, task in enumerate(tasks):
                tokens = answers[number]
                ended = len(tokens) < (task.params.max_tokens or 0)
                answer = RecordedAnswer(task.token_ids, tokens, ended, ranks[number])
                yield {"workload": workload.name, "temperature": temperature, **asdict(answer)}
            on_turn(f"{workload.name}, T = {temperature}")


@contextmanager
def _following_head() -> Iterator[None]:
    """A context in which the method's head follows known answers."""
    before = METHODS[HEAD]
    METHODS[HEAD] = replace(before, module=__name__, drafter=FollowingHead.__name__)
    try:
        yield
    finally:
        METHODS[HEAD] = before


def _answers(engine: Engine, tasks: Sequence[Task]) -> list[list[int]]:
    answers = EngineRunner(engine).run(tasks, closed(AT_ONCE)).answers
    return [answer.token_ids for answer in answers]


def read_recording(path: Path) -> Recording:
    """The recorded answers of a file."""
    found: dict[tuple[str, float], list[RecordedAnswer]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        facts = json.loads(line)
        key = facts.pop("workload"), facts.pop("temperature")
        found.setdefault(key, []).append(RecordedAnswer(**facts))
    return found
