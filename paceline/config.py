"""The engine's configuration: one frozen dataclass per component. All defaults are defined here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends.options import BackendOptions
from paceline.errors import ConfigError
from paceline.options import (
    check_bool,
    check_choice,
    check_integer,
    check_number,
    check_text,
    refuse_unknown,
    unknown_option,
)
from paceline.peer_options import instead_of

if TYPE_CHECKING:
    from paceline.draft.speculative_config import Speculation

DEFAULT_MODEL = "smollm2-135m"
ADAPTER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how much of its context."""

    model: str = DEFAULT_MODEL  # an alias, a folder of safetensors, a .gguf file or a hub id
    tokenizer: str | None = None  # None: the model's own
    max_model_len: int | None = None  # None: the model's context, or what fits into the KV cache
    lora_modules: Sequence[str] = ()  # NAME=FOLDER of each LoRA adapter

    def __post_init__(self) -> None:
        check_text(ConfigError, "model", self.model)
        _ = self.adapters  # report a mistake before a model is loaded
        if self.tokenizer is not None:
            check_text(ConfigError, "tokenizer", self.tokenizer)
        if self.max_model_len is not None:
            check_integer(ConfigError, "max_model_len", self.max_model_len, 2, None)

    @property
    def adapters(self) -> dict[str, Path]:
        """The folder of each adapter, by name."""
        found: dict[str, Path] = {}
        for entry in self.lora_modules:
            name, equals, folder = entry.partition("=")
            if not equals or not folder or not ADAPTER_NAME.fullmatch(name) or name in found:
                raise ConfigError(
                    f"lora_modules has {entry[:120]!r}; expected NAME=FOLDER, with a name of its own of "
                    "letters, digits, '_', '.' and '-'."
                )
            found[name] = Path(folder).expanduser()
        return found


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class CacheOptions:
    """KV cache memory."""

    kv_cache_memory_bytes: int | None = None  # None: computed by kv/sizing.py
    gpu_memory_utilization: float = 0.9  # fraction of GPU memory to use (cuda backend only)
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.kv_cache_memory_bytes is not None:
            check_integer(ConfigError, "kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, None)
        check_number(ConfigError, "gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, low_open=True)
        check_bool(ConfigError, "enable_prefix_caching", self.enable_prefix_caching)


USUAL_ROWS_PER_PASS = 512
# A GPU needs more rows to use its tensor cores: an 8B prefills 64 prompts in 0.85 of the time with 512.
ROWS_PER_PASS = {"cuda": 2048}  # by backend


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class SchedulerOptions:
    """Size of a batch."""

    max_num_seqs: int = 16  # requests per pass
    # rows per pass: decoded tokens, drafts and prefill chunks together; None: ROWS_PER_PASS of the backend
    max_num_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        check_integer(ConfigError, "max_num_seqs", self.max_num_seqs, 1, 4096)
        if self.max_num_batched_tokens is None:
            return
        check_integer(ConfigError, "max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}) so that every "
                f"request has a row, got {self.max_num_batched_tokens}. Raise the one or lower the other."
            )


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class SpeculativeOptions:
    """Speculation. "auto": suffix decoding and the model's shipped head, where they gain; "off": nothing,
    not even tokens that a grammar forces; None: forced tokens only. draft/methods.py has the methods."""

    speculative_config: Any = "auto"
    log_decisions: str | None = None  # path of a JSON Lines file with the reasons for the decisions of "auto"
    # for suffix and hybrid, also within "auto": responses | prompts | off. None: their own setting
    share_suffix_cache: str | None = None

    def __post_init__(self) -> None:
        if self.speculative_config not in (None, "off"):
            self.speculation()  # report a mistake before a model is loaded
        if self.share_suffix_cache is not None:
            from paceline.draft.lookup.suffix import SHARES  # here, to keep `--help` quick

            check_choice(ConfigError, "share_suffix_cache", self.share_suffix_cache, SHARES)
        if self.log_decisions is not None:
            check_text(ConfigError, "log_decisions", self.log_decisions, "Give the path of a file.")
            if not self.speculation().auto:
                raise ConfigError(
                    "log_decisions says why 'auto' drafts what it drafts, but speculative_config is "
                    f"{self.speculative_config!r}. Use 'auto', or leave log_decisions out."
                )

    def speculation(self) -> Speculation:
        """The drafters to load and how drafts are verified."""
        from paceline.draft.speculative_config import parse_speculative_config  # here, to keep `--help` quick

        parsed = parse_speculative_config(self.speculative_config)
        if self.share_suffix_cache is None:
            return parsed
        drafters = {
            name: replace(
                drafter, options=replace(drafter.options, share_suffix_cache=self.share_suffix_cache)
            )
            if hasattr(drafter.options, "share_suffix_cache")
            else drafter
            for name, drafter in parsed.drafters.items()
        }
        return replace(parsed, drafters=drafters)


@dataclass(frozen=True)
class EngineConfig:
    """The complete configuration of an engine."""

    model: ModelOptions = field(default_factory=ModelOptions)
    backend: BackendOptions = field(default_factory=BackendOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    seed: int = 0  # for requests without a seed

    def __post_init__(self) -> None:
        check_integer(ConfigError, "seed", self.seed, 0, 2**64 - 1)
        if self.speculative.speculative_config is not None:
            self._check_room_for_drafts()
        if self.backend.exact:
            self._check_rule()

    @property
    def max_num_batched_tokens(self) -> int:
        """Rows per pass: as asked for, or the backend's usual number, with a row for every request."""
        usual = ROWS_PER_PASS.get(self.backend.name, USUAL_ROWS_PER_PASS)
        return self.scheduler.max_num_batched_tokens or max(usual, self.scheduler.max_num_seqs)

    def _check_room_for_drafts(self) -> None:
        """Raise ConfigError if a draft can never fit into a pass."""
        rows = self.scheduler.max_num_batched_tokens or USUAL_ROWS_PER_PASS
        for name, drafter in self.speculative.speculation().drafters.items():
            if drafter.plan.budget >= rows:
                raise ConfigError(
                    f"num_speculative_tokens of {name} is {drafter.plan.budget}, but a pass has at most "
                    f"{rows} rows, one of them for the request's last token. Use at most {rows - 1}, or "
                    "raise max_num_batched_tokens."
                )

    def _check_rule(self) -> None:
        """Raise ConfigError if the verification rule preserves the distribution but not the bytes."""
        from paceline.verify.rules import RULES  # here, to keep `--help` quick

        rule = self.speculative.speculation().rule
        if not RULES[rule].same_bytes:
            raise ConfigError(
                f"exact: verification {rule!r} keeps the distribution of the output, not its bytes; use "
                "'pathwise', which is the default."
            )

    @staticmethod
    def from_options(**options: Any) -> EngineConfig:
        """The configuration with these options, named as users type them. Unknown ones raise ConfigError."""
        parts: dict[str, Any] = {}
        for name, kind in _SLICES.items():
            names = {item.name for item in fields(kind)}
            parts[name] = kind(**{option: options.pop(option) for option in list(options) if option in names})
        if "seed" in options:
            parts["seed"] = options.pop("seed")
        for option in options:
            if option == "draft":
                raise ConfigError(
                    "--draft of the command line is speculative_config here, in the same forms."
                )
            raise ConfigError(instead_of(option) or unknown_option(option, option_names(), "the engine"))
        return EngineConfig(**parts)


_SLICES: dict[str, type[Any]] = {
    "model": ModelOptions,
    "backend": BackendOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "speculative": SpeculativeOptions,
}


def option_names() -> list[str]:
    """The names of all engine options."""
    return [item.name for kind in _SLICES.values() for item in fields(kind)] + ["seed"]
