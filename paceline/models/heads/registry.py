"""Names of draft heads: from `shipped`, a path or a hub id to files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.models.files.hub import HUB_NAME
from paceline.models.heads.shipped import DEFAULT_METHOD, DEFAULT_TARGET, SHIPPED, SHIPPED_HEAD, shipped_head
from paceline.models.registry import in_folder, resolve

METHODS = ("eagle3", "eagle", "dflash", "dspark", "medusa")  # that have heads in files of their own


def resolve_head(name: str, method: str = DEFAULT_METHOD, fingerprint: str | None = None) -> Path:
    """The folder or file of a head; downloaded if it is on the hub.

    A name is `shipped` (for the target of this fingerprint, or for the default model if that is None), a path
    or a hub id, each also behind its method, as in eagle3:shipped.
    """
    prefix, colon, rest = name.partition(":")
    if colon and prefix in (*METHODS, "assistant"):
        if prefix != method:
            raise CheckpointError(f"{name!r} is a head of the method {prefix}: give one of {method}.")
        name = rest
    if name == SHIPPED_HEAD:
        return _shipped(method, fingerprint)
    path = Path(name).expanduser()
    with suppress(OSError):  # a name too long for a path
        if path.exists():
            return in_folder(path) if path.is_dir() else path
    if HUB_NAME.fullmatch(name) and not name.startswith((".", "/", "~")):
        return resolve(name)
    raise CheckpointError(
        f"There is no draft head {name!r}: no such file or folder exists. Give the folder of a head, a hub "
        f"id, or {SHIPPED_HEAD!r}, which names the head that comes with paceline."
    )


def _shipped(method: str, fingerprint: str | None) -> Path:
    """The shipped head of a target; without a fingerprint, that of the default model."""
    heads = sorted(path.parent for path in (SHIPPED / method).glob("*/config.json"))
    if fingerprint is None:
        found = next((path for path in heads if path.name == DEFAULT_TARGET), None)
    else:
        found = shipped_head(method, fingerprint)
    if found is None:
        known = ", ".join(f"{path.name} ({path})" for path in heads)
        where = f"for this target, only for {known}" if known else "with paceline"
        raise CheckpointError(
            f"no {method} head is shipped {where}. Name a head by its folder, or "
            "train one: see `paceline train --help`."
        )
    return found
