"""A constraint that is a table: what it allows is looked up by the whole path, so nothing is rewound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.token_masks import packed_ids
from paceline.errors import GrammarError

Path = tuple[int, ...]


@dataclass
class TableConstraint:
    """Has the members of Constraint. A token that is alone is forced."""

    vocab: int
    allowed: Callable[[Path], set[int]]
    path: Path = ()

    def forced(self) -> Path:
        run: Path = ()
        while len(run) < 8 and len(options := self.allowed((*self.path, *run))) == 1:
            run = (*run, *options)
        return run

    def allows(self, token: int) -> bool:
        return token in self.allowed(self.path)

    def packed_mask(self) -> np.ndarray:
        return packed_ids(np.array(list(self.allowed(self.path)), dtype=np.int64), self.vocab)

    def advance(self, token: int) -> None:
        if not self.allows(token):
            raise GrammarError("not by its grammar")
        self.path = (*self.path, token)

    def branch(self) -> TableConstraint:
        return replace(self)
