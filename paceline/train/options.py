"""Options of head training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import ConfigError
from paceline.options import check_integer, check_number, refuse_unknown
from paceline.train.objectives.losses import LOSSES

MAX_WEIGHT = 100  # of a segment
WEIGHTINGS = ("decay", "d-pace")


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class TrainOptions:
    """Options for every kind of head.

    The same options, data and device give the same weights, if `batch_tokens` is given and `minutes` is not.
    """

    epochs: int = 3  # passes over all answers
    max_steps: int | None = None  # number of optimizer steps, instead of epochs
    minutes: float | None = None  # of answering, training and measuring together, instead of epochs
    max_epochs: int | None = None  # within `minutes`; None: as many as fit
    step_decay: float = 0.8  # loss weight of each token ahead, relative to the previous one
    loss: str = "kl"  # or ce, l1, or lk for temperatures around 1; see losses.py
    draft_vocab_size: int = 8192  # the most frequent answered tokens
    batch_tokens: int | None = None  # per step; None: chosen by the speed of the device
    max_length: int = 1024  # tokens per example; longer ones are trained on in parts that overlap
    learning_rate: float = 5e-4
    warmup_steps: int = 100
    clip: float = 1.0  # maximum norm of the gradient
    held_out: float = 0.02  # fraction of the prompts held out for evaluation
    keep_states: float = 0.0  # GB of the target's states that are computed only once; see state_cache.py
    checkpoint_every: int = 500  # steps
    average: float = 0.0  # decay per step of the average of the weights that is written; 0: the last ones
    checks: int = 8  # of acceptance on held-out answers: the best weights are written; 0: the last ones
    round_weights: bool = False  # the second half of training sees 4-bit matrices; see rounding.py
    weights: str = ""  # of segments, such as chat=2,code=0.5: how often an epoch has each of their examples
    seed: int = 0

    @property
    def segment_weights(self) -> Mapping[str, float]:
        """The weights by segment; others have 1."""
        pairs = [part.rpartition("=") for part in self.weights.split(",") if part]
        try:
            found = {segment.strip(): float(weight) for segment, _, weight in pairs}
        except ValueError:
            found = {"": 0.0}
        if not all(found) or not all(0 < weight <= MAX_WEIGHT for weight in found.values()):
            raise ConfigError(
                f"weights are segments with numbers above 0 and up to {MAX_WEIGHT}, such as chat=2,code=0.5; "
                f"got {self.weights!r}."
            )
        return found

    def step_weights(self, steps: int) -> list[float]:
        """The loss weight of each token ahead."""
        return [self.step_decay**step for step in range(steps)]

    def __post_init__(self) -> None:
        _ = self.segment_weights  # refuses what it cannot read
        for name, low in (
            ("epochs", 1),
            ("draft_vocab_size", 1),
            ("max_length", 4),
            ("warmup_steps", 0),
            ("checkpoint_every", 1),
            ("checks", 0),
            ("seed", 0),
        ):
            check_integer(ConfigError, name, getattr(self, name), low, None)
        for name, low in (("max_steps", 1), ("max_epochs", 1), ("batch_tokens", 16)):
            if getattr(self, name) is not None:
                check_integer(ConfigError, name, getattr(self, name), low, None)
        if self.loss not in LOSSES:
            raise ConfigError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}.")
        for name, high in (("step_decay", 1.0), ("learning_rate", 1.0), ("clip", 1e9)):
            check_number(ConfigError, name, getattr(self, name), 0.0, high, low_open=True)
        check_number(ConfigError, "held_out", self.held_out, 0.0, 0.5)
        check_number(ConfigError, "average", self.average, 0.0, 0.99999)
        check_number(ConfigError, "keep_states", self.keep_states, 0.0, 1e5)
        if self.minutes is not None:
            check_number(ConfigError, "minutes", self.minutes, 0.0, 1e6, low_open=True)
        if self.minutes is not None and self.max_steps is not None:
            raise ConfigError("minutes and max_steps both say when to stop: give one of them.")
        if self.max_epochs is not None and self.minutes is None:
            raise ConfigError("max_epochs is a limit of minutes: give minutes too, or epochs instead.")


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class Eagle3Options(TrainOptions):
    """Options of an EAGLE-3 head."""

    unroll: int = 5  # draft steps per slot in training
    intermediate_size: int | None = None  # of the head's MLP; None: the target's
    fc_norm: bool = True  # EAGLE-3.1: one norm per feature
    norm_output: bool = True  # EAGLE-3.1: feed the normalized state back

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(ConfigError, "unroll", self.unroll, 1, None)
        if self.intermediate_size is not None:
            check_integer(ConfigError, "intermediate_size", self.intermediate_size, 1, None)


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class PEagleOptions(Eagle3Options):
    """Options of a P-EAGLE head: an EAGLE-3 head that guesses all tokens of a draft in one pass."""

    layers: int = 4
    norm_output: bool = False  # nothing is fed back

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(ConfigError, "layers", self.layers, 1, 64)


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class BlockOptions(TrainOptions):
    """Options of a DFlash head, and the ones common to all parallel heads."""

    recipe: ClassVar[str] = "dflash"
    step_decay: float = 0.78  # exp(-1/4)
    layers: int = 5
    block_size: int = 8  # slots of a block, the anchor included
    features: int = 5  # hidden states of the target that the head reads
    anchors: float = 0.25  # blocks per answered token
    weighting: str = "decay"  # of tokens ahead: by step_decay, or d-pace: by the head's own chances
    intermediate_size: int | None = None  # of the head's MLPs; None: the target's
    fc_norm: bool = True  # one norm per feature, as EAGLE-3.1 has them
    average: float = 0.999

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low, high in (("layers", 1, 64), ("block_size", 2, 64), ("features", 1, 64)):
            check_integer(ConfigError, name, getattr(self, name), low, high)
        check_number(ConfigError, "anchors", self.anchors, 0.0, 1.0, low_open=True)
        if self.weighting not in WEIGHTINGS:
            raise ConfigError(f"weighting must be one of {', '.join(WEIGHTINGS)}, got {self.weighting!r}.")
        if self.intermediate_size is not None:
            check_integer(ConfigError, "intermediate_size", self.intermediate_size, 1, None)

    def step_weights(self, steps: int) -> list[float]:
        return super().step_weights(steps) if self.weighting == "decay" else [1.0] * steps


class JetSpecOptions(BlockOptions):
    """Options of a JetSpec head: a DFlash head whose slots see only those before them."""

    recipe = "jetspec"


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class DFlash2Options(BlockOptions):
    """Options of a DFlash2 head: convolutions in the block, a selector among a slot's best guesses."""

    recipe: ClassVar[str] = "dflash2"
    loss: str = "ce"
    convolution_group: int = 16  # channels that share a correction of the kernels
    selector_rank: int = 256
    selector_candidates: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, high in (("convolution_group", 4096), ("selector_rank", 4096), ("selector_candidates", 64)):
            check_integer(ConfigError, name, getattr(self, name), 1, high)


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class DSparkOptions(BlockOptions):
    """Options of a DSpark head."""

    recipe: ClassVar[str] = "dspark"
    loss: str = "l1"
    block_size: int = 7
    markov_rank: int = 256  # of what the token before adds to the logits

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(ConfigError, "markov_rank", self.markov_rank, 1, 4096)


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class MedusaOptions(TrainOptions):
    """Options of Medusa heads."""

    learning_rate: float = 1e-3
    heads: int = 5  # each predicts one token further ahead
    layers: int = 1  # residual blocks per head

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(ConfigError, "heads", self.heads, 1, 64)
        check_integer(ConfigError, "layers", self.layers, 0, 64)
