"""What a user may choose about training a head."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.options import check_integer, check_number, refuse_unknown
from paceline.train.losses import LOSSES


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class TrainOptions:
    """How any head is trained. The same options, data and device give the same weights."""

    epochs: int = 3  # how often each answer is seen
    max_steps: int | None = None  # at most so many optimizer steps, instead of epochs
    minutes: float | None = None  # as many steps as fit into this time, instead of epochs
    step_decay: float = 0.8  # weight of the loss of each token ahead, relative to the one before
    loss: str = "kl"  # or lk, for temperatures about 1: see losses.py
    draft_vocab_size: int = 8192  # the most frequent answered tokens
    batch_tokens: int = 8192  # of one step, padding included
    max_length: int = 1024  # tokens of an example; the rest is cut off
    learning_rate: float = 5e-4
    warmup_steps: int = 100
    clip: float = 1.0  # largest norm of the gradient
    held_out: float = 0.02  # share of the examples that is kept for the evaluation
    checkpoint_every: int = 500  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("epochs", 1),
            ("draft_vocab_size", 1),
            ("batch_tokens", 16),
            ("max_length", 4),
            ("warmup_steps", 0),
            ("checkpoint_every", 1),
            ("seed", 0),
        ):
            check_integer(ConfigError, name, getattr(self, name), low, None)
        if self.max_steps is not None:
            check_integer(ConfigError, "max_steps", self.max_steps, 1, None)
        if self.loss not in LOSSES:
            raise ConfigError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}.")
        for name, high in (("step_decay", 1.0), ("learning_rate", 1.0), ("clip", 1e9)):
            check_number(ConfigError, name, getattr(self, name), 0.0, high, low_open=True)
        check_number(ConfigError, "held_out", self.held_out, 0.0, 0.5)
        if self.minutes is not None:
            check_number(ConfigError, "minutes", self.minutes, 0.0, 1e6, low_open=True)
        if self.minutes is not None and self.max_steps is not None:
            raise ConfigError("minutes and max_steps both say when to stop: give one of them.")


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class Eagle3Options(TrainOptions):
    """How an EAGLE-3 head is trained."""

    unroll: int = 5  # draft steps that are trained
    intermediate_size: int | None = None  # of the head's MLP; None: the target's
    fc_norm: bool = True  # EAGLE-3.1: a norm for each feature
    norm_output: bool = True  # EAGLE-3.1: feed back the normed state

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(ConfigError, "unroll", self.unroll, 1, None)
        if self.intermediate_size is not None:
            check_integer(ConfigError, "intermediate_size", self.intermediate_size, 1, None)


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class MedusaOptions(TrainOptions):
    """How Medusa heads are trained."""

    learning_rate: float = 1e-3
    heads: int = 5  # each guesses one token further ahead
    layers: int = 1  # residual blocks of each head

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(ConfigError, "heads", self.heads, 1, 64)
        check_integer(ConfigError, "layers", self.layers, 0, 64)
