"""The objective that trains an existing head further: which kinds of heads can learn from traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import TargetName
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.objectives.block_objective import BlockObjective
from paceline.train.objectives.eagle3_objective import Eagle3Objective
from paceline.train.objectives.objective import Objective
from paceline.train.options import BlockOptions, DSparkOptions, Eagle3Options, TrainOptions

# an existing head has its draft vocabulary: none is chosen from examples; nor are states of any kept
_NOTHING = np.empty(0, dtype=np.int32)
NO_EXAMPLES = Examples(0, _NOTHING, np.zeros(1, dtype=np.int64), _NOTHING, _NOTHING, [])
Make = Callable[[Transformer, Examples, Any, TargetName, HeadCheckpoint], Objective]


@dataclass(frozen=True)
class Kind:
    """A kind of head that can be trained further."""

    options: type[TrainOptions]
    make: Make


KINDS: dict[str, Kind] = {
    "eagle3": Kind(Eagle3Options, Eagle3Objective),
    "dflash": Kind(BlockOptions, BlockObjective),
    "dspark": Kind(DSparkOptions, BlockObjective),
}


def options_for(head: HeadCheckpoint, **given: Any) -> TrainOptions:
    """The training options of this kind of head; ConfigError if it cannot be trained further."""
    kind = _kind_of(head)
    return kind.options(**{name: value for name, value in given.items() if name in _names(kind)})


def objective_for(
    head: HeadCheckpoint, target: Transformer, name: TargetName, options: TrainOptions | None = None
) -> Objective:
    """The head, ready to be trained or to be scored on this target."""
    kind = _kind_of(head)
    objective = kind.make(target, NO_EXAMPLES, options or kind.options(), name, head)
    if not target.embedding.is_cuda:  # a GPU takes as long for few tokens: launches
        objective.reuse_prefixes()
    return objective


def _kind_of(head: HeadCheckpoint) -> Kind:
    kind = KINDS.get(head.config.kind)
    if kind is None:
        raise ConfigError(
            f"{head.source} is a head of kind {head.config.kind!r}, which cannot learn from traffic: serve "
            f"a head of kind {', '.join(KINDS)}."
        )
    return kind


def _names(kind: Kind) -> set[str]:
    return {field.name for field in fields(kind.options)}
