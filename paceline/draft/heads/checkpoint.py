"""What a loaded head is, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.draft.heads.config import HeadConfig
from paceline.models.checkpoint import Tensor

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head ready to be given to a runner. Its tensors have the names of config.py."""

    config: HeadConfig
    tensors: Mapping[str, Tensor]
    draft_ids: Int32Array | None  # [draft vocabulary] the target's id of each guess; None: the same ids
    source: Path
