"""mtp: the block for multi-token prediction that a target brings along drafts for it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.draft.base import Target
from paceline.draft.eagle import HeadDrafter
from paceline.draft.head_options import check_features, check_min_prob, check_quantization
from paceline.errors import ConfigError
from paceline.models.heads.mtp import mtp_head
from paceline.options import refuse_unknown


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class MtpOptions:
    """The keys of speculative_config that are mtp's own."""

    quantization: str | None = None  # of the block's weights on the cpu backend: int8 or int4; None: int4
    min_prob: float | None = None  # a chain ends where its chance is less; 0: never; None: what pays here

    def __post_init__(self) -> None:
        check_min_prob(self.min_prob)
        check_quantization(self.quantization)


class MtpDrafter(HeadDrafter):
    """Drafts with a head that is a part of the target's own checkpoint."""

    name = "mtp"
    Options = MtpOptions

    @classmethod
    def load(cls, options: MtpOptions, target: Target) -> MtpDrafter:
        """The drafter with the block that the target's files have."""
        check_features(cls.name, target)
        return cls.beside(mtp_head(target.config, target.mtp), target, options.quantization, options.min_prob)
