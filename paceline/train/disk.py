"""Files that cannot be written, told as what a user can mend: a full disk, a folder of someone else's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from safetensors import SafetensorError

from paceline.errors import ConfigError


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Within it, a failure to write becomes a ConfigError that names the path and ends with the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be written ({error}). {remedy}") from error


def make_folder(path: Path) -> None:
    """Make a folder, if there is none, and see that it can be written: before hours of work, not after."""
    with writing(path, "Give another folder with --out."):
        path.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path).close()
