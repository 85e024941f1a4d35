"""Write errors as messages with a remedy: a full disk, a folder without permission."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from safetensors import SafetensorError

from paceline.errors import ConfigError


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """A context in which a failed write raises ConfigError with the path and the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be written ({error}). {remedy}") from error


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create the folder, with this mode, and check that it is writable: before hours of work, not after."""
    with writing(path, "Give another folder with --out."):
        path.mkdir(parents=True, exist_ok=True, mode=mode)
        TemporaryFile(dir=path).close()
