"""LearnOptions: the --learn flags of `paceline serve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from paceline.errors import ConfigError
from paceline.home import paceline_home
from paceline.learn.data.rows import TrafficRow
from paceline.learn.data.store import DAY, StoreLimits
from paceline.options import check_bool, check_choice, check_integer, check_number, refuse_unknown

SALTS = ("off", "shared", "own")
Decode: TypeAlias = Callable[[Sequence[int]], str]
Redact: TypeAlias = Callable[[TrafficRow, Decode], TrafficRow | None]


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class LearnOptions:
    """What a server keeps of its traffic to learn from. Off: nothing."""

    learn: bool = False
    learn_dir: str | None = None  # None: in PACELINE_HOME, a folder for each model
    learn_share: float = 1.0  # of the finished requests
    learn_max_bytes: int = 256 * 1024 * 1024  # on disk
    learn_max_age: float = 14.0  # days
    learn_salts: str = "off"  # requests with a salt: not kept; kept for all; kept, each for its own head
    learn_salt: str | None = None  # learn from this salt alone, and draft with its head for no other
    learn_skip_key: tuple[str, ...] = ()  # API keys whose requests are not kept
    learn_generic: tuple[str, ...] = ()  # files of `paceline train answers`, replayed against forgetting
    learn_min_rows: int = 200  # new rows before a training
    learn_minutes: float = 20.0  # of a training, without the time that it waits
    learn_max_running: int = 2  # requests; with more, or with any that waits, training waits too
    learn_max_slowdown: float = 0.02  # part of the tokens per second that training may cost
    learn_gpu_share: float = 0.1  # of a GPU's time that training takes while no request runs
    learn_redact: str | None = None  # MODULE:FUNCTION that every row goes through before it is kept

    def __post_init__(self) -> None:
        check_bool(ConfigError, "learn", self.learn)
        check_number(ConfigError, "learn_share", self.learn_share, 0.0, 1.0, low_open=True)
        check_integer(ConfigError, "learn_max_bytes", self.learn_max_bytes, 1 << 16, None)
        check_number(ConfigError, "learn_max_age", self.learn_max_age, 0.0, 36500.0, low_open=True)
        check_integer(ConfigError, "learn_min_rows", self.learn_min_rows, 1, None)
        check_number(ConfigError, "learn_minutes", self.learn_minutes, 0.0, 1e6, low_open=True)
        check_integer(ConfigError, "learn_max_running", self.learn_max_running, 0, None)
        for name in ("learn_max_slowdown", "learn_gpu_share"):
            check_number(ConfigError, name, getattr(self, name), 0.0, 1.0, low_open=True)
        for file in self.learn_generic:
            if not Path(file).expanduser().is_file():
                raise ConfigError(f"--learn-generic {file} is no file: make one by `paceline train answers`.")
        check_choice(ConfigError, "learn_salts", self.learn_salts, SALTS)
        if self.learn_salt is not None and (not self.learn_salt or self.learn_salts != SALTS[0]):
            raise ConfigError(
                "--learn-salt names the one salt whose requests are kept: give a name, and no --learn-salts."
            )

    @property
    def limits(self) -> StoreLimits:
        """The limits of the store."""
        return StoreLimits(self.learn_max_bytes, self.learn_max_age * DAY, self.learn_share)

    def folder(self, fingerprint: str) -> Path:
        """The folder for what is learned with the target of this fingerprint."""
        if self.learn_dir is not None:
            return Path(self.learn_dir).expanduser()
        return paceline_home() / "learn" / fingerprint

    def redact(self) -> Redact | None:
        """The function that rows go through; ConfigError if it cannot be imported."""
        if self.learn_redact is None:
            return None
        module, _, name = self.learn_redact.partition(":")
        try:
            found: Redact = getattr(import_module(module), name)
        except Exception as error:  # whatever a module of a user raises while it is imported
            raise ConfigError(
                f"--learn-redact must be MODULE:FUNCTION that Python can import, got {self.learn_redact!r} "
                f"({type(error).__name__}: {error}). Is its folder in PYTHONPATH?"
            ) from error
        return found
