"""Scores: held-back answers drafted again with the candidate and with the serving head, beside the traffic.

The target's features of prompt and answer come from one pass, and the head drafts after every answered token;
see loop/acceptance.py. The passes are as many as plain chains of the head would have needed, greedy and at
full length, whatever drafted when the answer was served: so two heads are compared on the same terms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.errors import CheckpointError
from paceline.learn.data.rows import TrafficRow
from paceline.learn.data.selection import usable
from paceline.learn.data.split import Side, side_of, unit_hash
from paceline.learn.data.store import TrafficStore
from paceline.learn.evaluation.gate import GateConfig, Replay, RowScore, group_sizes, judge
from paceline.learn.training.limits import load_target_beside_server
from paceline.learn.training.objectives import objective_for
from paceline.models.heads.checkpoint import HeadCheckpoint, load_head
from paceline.models.heads.config import TargetName
from paceline.models.heads.fingerprint import check_target, target_fingerprint
from paceline.models.registry import load_checkpoint, resolve
from paceline.models.transformer.model import Transformer
from paceline.train.loop.acceptance import by_pass
from paceline.train.loop.batches import pack
from paceline.train.loop.sequences import TargetStates
from paceline.train.objectives.objective import Objective

MAX_ROWS = 256  # rows that judge a candidate
MAX_LENGTH = 1024  # tokens of prompt and answer; longer answers are cut
OnProgress = Callable[[int, int], None]  # rows scored so far, and rows planned


def check_finite(head: HeadCheckpoint) -> None:
    """CheckpointError if a weight of the head is not a finite number."""
    for name, tensor in head.tensors.items():
        if not np.isfinite(tensor.float32()).all():
            raise CheckpointError(
                f"{head.source}: the tensor {name} has weights that are not finite. Train it again."
            )


def gate_rows(rows: Iterable[TrafficRow], most: int = MAX_ROWS, salt: str = "") -> list[TrafficRow]:
    """The rows that judge candidates: one per prompt, half of them the newest, half from all the time before.

    Oldest first. Answers that no draft can shorten, that do not fit or that have another salt are left out.
    """
    by_prompt: dict[tuple[int, ...], TrafficRow] = {}
    for row in rows:
        if usable(row, salt, MAX_LENGTH) and side_of(row.prompt_ids) is Side.GATE:
            by_prompt.pop(row.prompt_ids, None)  # the newest answer, at the newest place
            by_prompt[row.prompt_ids] = row
    found = list(by_prompt.values())
    if len(found) <= most:
        return found
    older, newest = found[: -(most // 2)], found[-(most // 2) :]
    chosen = np.linspace(0, len(older) - 1, most - len(newest)).round().astype(int)
    return [*(older[index] for index in chosen), *newest]


def replay_acceptance(
    target: Transformer,
    name: TargetName,
    heads: Sequence[HeadCheckpoint],
    rows: Sequence[TrafficRow],
) -> Iterator[list[RowScore]]:
    """The scores of the rows, one after the other, with each of these heads.

    The same heads and rows give the same scores.
    """
    for head in heads:
        check_finite(head)
    objectives = [objective_for(head, target, name) for head in heads]
    for row in rows:
        yield score_row(objectives, row)


def score_heads(
    model: str,
    traffic: Path,
    present: Path,
    candidate: Path,
    may_go_on: Callable[[], bool] = lambda: True,
    salt: str = "",
    device: str = "cpu",
    on_progress: OnProgress = lambda scored, planned: None,
    config: GateConfig | None = None,
) -> Replay | None:
    """The scores of both heads on the same stored rows of a salt, until the gate decides.

    None if `may_go_on`, which is called before each row, returns False. PacelineError if a head or the
    traffic is of another target than `model`, or cannot be read.
    """
    config = config or GateConfig()
    checkpoint = load_checkpoint(resolve(model))
    name = TargetName(target_fingerprint(checkpoint), checkpoint.source.name)
    loaded = [load_head(head) for head in (present, candidate)]
    for head in loaded:
        check_target(head.config, checkpoint.config, name.fingerprint, str(head.source))
    rows = gate_rows(TrafficStore(traffic, name).rows(), salt=salt)
    rows.sort(key=lambda row: unit_hash("score", row.prompt_ids))  # so the first ones are a random sample
    replay = Replay([], [], len(rows), group_sizes((row.segment, row.key) for row in rows))
    target = load_target_beside_server(checkpoint, device)
    scores = replay_acceptance(target, name, loaded, rows)
    for scored in range(1, len(rows) + 1):
        if not may_go_on():
            return None
        old, new = next(scores)
        replay.present.append(old)
        replay.candidate.append(new)
        on_progress(scored, len(rows))
        if scored in config.looks and judge(replay, config=config).decided:
            break
    return replay


def score_row(objectives: Sequence[Objective], row: TrafficRow) -> list[RowScore]:
    """The scores of one row with each head. The row is alone in its batch, so rounding depends on it
    alone."""
    first, device = len(row.prompt_ids), objectives[0].target.embedding.device
    batch = pack([[*row.prompt_ids, *row.output_ids][:MAX_LENGTH]], [first], device)
    states, scores = dict[tuple[int, ...], TargetStates](), list[RowScore]()
    for objective in objectives:  # heads that read the same layers share the target's pass
        if objective.layers not in states:
            states[objective.layers] = objective.states(batch)
        accepted = objective.accepted(batch, states[objective.layers])[0, first : batch.sizes[0] - 1]
        passes = by_pass(accepted.tolist())
        key = _hash(row.prompt_ids), row.segment
        scores.append(RowScore(*key, len(accepted), len(passes), row.key, tuple(passes)))
    return scores


def _hash(ids: Sequence[int]) -> str:
    return hashlib.blake2b(np.array(ids, dtype="<i4").tobytes(), digest_size=8).hexdigest()
