"""mtp: the target's own block for multi-token prediction drafts."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.draft.base import Target, UnboundDrafter
from paceline.draft.heads.eagle import HeadDrafter
from paceline.draft.heads.head_options import check_features, check_min_prob, check_quantization
from paceline.errors import ConfigError
from paceline.models.heads.mtp import mtp_head
from paceline.options import refuse_unknown


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class MtpOptions:
    """The keys of speculative_config for method mtp."""

    quantization: str | None = None  # of the block's weights on the cpu backend: int8 or int4; None: int4
    # a chain ends where its chance is lower; 0: never; None: the backend's value
    min_prob: float | None = None

    def __post_init__(self) -> None:
        check_min_prob(self.min_prob)
        check_quantization(self.quantization)


class MtpDrafter(HeadDrafter):
    """Drafts with a head that is part of the target's checkpoint."""

    name = "mtp"
    Options = MtpOptions

    @classmethod
    def load(cls, options: MtpOptions, target: Target) -> UnboundDrafter:
        """The drafter with the MTP block of the target's files."""
        check_features(cls.name, target)
        return cls.from_checkpoint(
            mtp_head(target.config, target.mtp), target, options.quantization, options.min_prob
        )
