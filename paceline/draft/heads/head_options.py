"""The options of learned heads, and finding the head's files."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from paceline.draft.base import Target
from paceline.errors import ConfigError
from paceline.models.heads.shipped import SHIPPED_HEAD
from paceline.options import check_bool, check_number, refuse_unknown

logger = logging.getLogger(__name__)

QUANTIZATIONS = ("int8", "int4")  # of a head on the cpu backend


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class HeadOptions:
    """The keys of speculative_config for all learned heads."""

    model: str | None = None  # folder, file or hub id; None or "shipped": the one shipped for the target
    any_target: bool = False  # accept a head that was trained for another model of the same sizes
    # a chain ends where its chance is lower; 0: never; None: the backend's value
    min_prob: float | None = None

    def __post_init__(self) -> None:
        check_min_prob(self.min_prob)
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise ConfigError(f"model must be the path of a draft head, got {self.model!r}.")
        check_bool(ConfigError, "any_target", self.any_target)


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class EagleOptions(HeadOptions):
    """The keys of speculative_config for EAGLE heads and parallel heads."""

    quantization: str | None = None  # of its weights on the cpu backend: int8 or int4; None: int4
    # vLLM's name for heads that guess all tokens of a draft in one pass; None: as the head's file says
    parallel_drafting: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_quantization(self.quantization)
        if self.parallel_drafting is not None:
            check_bool(ConfigError, "parallel_drafting", self.parallel_drafting)


def check_min_prob(min_prob: float | None) -> None:
    """ConfigError if min_prob is not a probability."""
    if min_prob is not None:
        check_number(ConfigError, "min_prob", min_prob, 0.0, 1.0, remedy="0 drafts always as many as asked.")


def check_quantization(quantization: str | None) -> None:
    """ConfigError if a head cannot have this quantization; it names those it can."""
    if quantization not in (None, *QUANTIZATIONS):
        names = " or ".join(QUANTIZATIONS)
        raise ConfigError(f"quantization of a draft head must be {names}, got {quantization!r}.")


def check_features(method: str, target: Target) -> None:
    """ConfigError if the target's backend does not return hidden states."""
    if not target.loaded.supports_features:
        raise ConfigError(
            f"the method {method} reads hidden states of the target, which the {target.loaded.name} backend "
            "does not give. Use another method or another backend."
        )


def find_head(options: HeadOptions, method: str, target: Target) -> Path:
    """The folder or file of the head that the options name, downloaded if it is on the hub.

    ConfigError if the target cannot have a head; CheckpointError if there is no such head.
    """
    from paceline.models.heads.registry import resolve_head

    check_features(method, target)
    path = resolve_head(options.model or SHIPPED_HEAD, method, target.fingerprint)
    if options.model in (None, SHIPPED_HEAD):
        logger.debug("drafting with the %s head that is shipped for %s", method, path.name)
    return path
