"""Models of the Hugging Face hub: which files of a repository make a model, and their download.

    org/name             the safetensors of the repository, or, if it has only GGUF files, the best known one
    org/name:Q4_K_M      the GGUF file of this quantization
    org/name:file.gguf   this file, by its name or its path in the repository
    qwen3:4b             a short name of SHORT_NAMES

Files go to the hub client's own cache, which other tools share; it resumes broken downloads and shows their
progress. Only weights, configuration and tokenizer are fetched, never code, and no pickle but that of a draft
head's MASK_EMBEDDING, of which only the tensor is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.extras import needs_extra
from paceline.models.chat import TEMPLATES
from paceline.models.files.mapped import read_json
from paceline.models.files.safetensors_files import INDEX_FILE, weight_files
from paceline.models.gguf.reader import split_names
from paceline.models.quantized.method import OLD_CONFIGS

HUB_NAME = re.compile(
    r"((https://)?(hf\.co|huggingface\.co)/)?(?P<repository>[\w.-]+/[\w.-]+)(:(?P<wanted>[\w./-]+))?"
)
# short names, as other tools have them, for repositories of GGUF files
SHORT_NAMES = {
    "qwen3:0.6b": "Qwen/Qwen3-0.6B-GGUF",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B-GGUF",
    "qwen3:4b": "Qwen/Qwen3-4B-GGUF",
    "qwen3:8b": "Qwen/Qwen3-8B-GGUF",
    "qwen3:14b": "Qwen/Qwen3-14B-GGUF",
    "qwen3:32b": "Qwen/Qwen3-32B-GGUF",
    "qwen3:30b-a3b": "Qwen/Qwen3-30B-A3B-GGUF",
    "qwen2.5-coder:7b": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF",
    "gpt-oss:20b": "ggml-org/gpt-oss-20b-GGUF",
    "gpt-oss:120b": "ggml-org/gpt-oss-120b-GGUF",
    "gemma3:1b": "ggml-org/gemma-3-1b-it-GGUF",
    "gemma3:4b": "ggml-org/gemma-3-4b-it-GGUF",
    "gemma3:12b": "ggml-org/gemma-3-12b-it-GGUF",
    "gemma3:27b": "ggml-org/gemma-3-27b-it-GGUF",
    "smollm3:3b": "ggml-org/SmolLM3-3B-GGUF",
    "llama3.1:8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
    "llama3.2:1b": "bartowski/Llama-3.2-1B-Instruct-GGUF",
    "llama3.2:3b": "bartowski/Llama-3.2-3B-Instruct-GGUF",
    "mistral:7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF",
    "phi4:14b": "bartowski/phi-4-GGUF",
}
MASK_EMBEDDING = "mask_embedding.pt"  # beside the weights of some parallel heads: a tensor [hidden]
FILES = [INDEX_FILE, "config.json", "generation_config.json", *OLD_CONFIGS]
FILES += [MASK_EMBEDDING, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", *TEMPLATES]
# of several GGUF files, if none is asked for: small and good first
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
QUANTIZATION = re.compile(r"(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*)(?=[.-]|$)", re.IGNORECASE)
# names of files beside a model: its vision part, an importance matrix, and draft models, as in
# mtp-gemma-4-12B-it.gguf and MTP/gemma-4-E2B-it-Q8_0-MTP.gguf; Qwen3.6-27B-MTP-Q8_0.gguf is a model
HEAD = re.compile(r"(^|/)(eagle3|dflash|dspark)-[^/]*$", re.IGNORECASE)
BESIDE = re.compile(r"mmproj|(^|/)(imatrix|mtp[-/])|[.-](imatrix|mtp)\.gguf$", re.IGNORECASE)
SPLIT = re.compile(r"-(\d{5})-of-\d{5}$")  # at the end of the names of parts, without .gguf
MAX_NAMES_IN_ERROR = 12
WHOLE_FOLDER = "."
# errors of the client and of its HTTP library: the hub was not asked, or gave no answer
UNREACHABLE = {"OfflineModeIsEnabled", "TransportError", "ConnectionError"}
# by the name of the client's exception, the narrower first: what to do
REMEDIES = {
    "OfflineModeIsEnabled": "it is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub. Unset it, or "
    "fetch it first",
    "GatedRepoError": "it needs its authors' permission. Ask for it at https://huggingface.co/{repository}, "
    "then set HF_TOKEN to a token of your account",
    "RepositoryNotFoundError": "there is no such repository, or it is private. Check its name; for a private "
    "one set HF_TOKEN to a token of your account",
    "LocalEntryNotFoundError": "it is not in the cache, and the hub cannot be reached. Check the network and "
    "HF_ENDPOINT, or fetch it on another machine and give the folder",
}


def fetch_from_hub(name: str) -> Path:
    """The folder of safetensors, or the .gguf file, that this name means; downloaded if needed."""
    match = HUB_NAME.fullmatch(name)
    assert match is not None, "callers ask for names of this form only"
    repository, wanted = match["repository"], match["wanted"]
    with needs_extra("hub", f"fetching {name!r} from the hub", ModelError):
        import huggingface_hub
    _log_once(huggingface_hub)
    try:
        return _fetch(huggingface_hub, repository, wanted)
    except ModelError:
        raise
    except Exception as error:  # the client raises many types, also those of its HTTP library
        kinds = _kinds(error)
        if _is_unreachable(error):
            kinds.add("LocalEntryNotFoundError")  # what the client says where it has tried the cache itself
        remedy = next((text for kind, text in REMEDIES.items() if kind in kinds), None)
        what = remedy or f"{str(error)[:300]}. Check the name, the network and the disk"
        what = what.replace("{repository}", repository)
        raise ModelError(f"{repository} could not be fetched from the hub: {what}.") from error


def _log_once(hub: Any) -> None:
    """Leave the client's log lines to the program's handlers, if it has any: its own one repeats them."""
    if logging.getLogger().handlers:
        hub.logging.get_logger().handlers.clear()  # the module adds the handler when it is first used


def _fetch(hub: Any, repository: str, wanted: str | None) -> Path:
    try:
        files = list(hub.HfApi().list_repo_files(repository))
    except Exception as error:  # as above
        folder = _cached(hub, repository) if _is_unreachable(error) else None
        if folder is None:
            raise
        there = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        try:
            return folder / _choose(repository, there, wanted)
        except ModelError:
            raise ModelError(
                f"{repository} is only partly in the cache, and the hub cannot be reached: it has "
                f"{', '.join(sorted(there)[:MAX_NAMES_IN_ERROR]) or 'no file'}. Name one of these, or "
                "fetch the rest with a connection."
            ) from error
    if _choose(repository, files, wanted) == WHOLE_FOLDER:
        weights = _indexed(hub, repository, files) or weight_files(files)
        return Path(hub.snapshot_download(repository, allow_patterns=[*FILES, *weights]))
    names = split_names(_choose(repository, files, wanted))
    paths = [Path(hub.hf_hub_download(repository, name)) for name in names]
    return paths[0]


def _indexed(hub: Any, repository: str, files: Sequence[str]) -> list[str]:
    """The weight files that an index names, which may have any name; none if there is no index."""
    if INDEX_FILE not in files:
        return []
    named = read_json(Path(hub.hf_hub_download(repository, INDEX_FILE))).get("weight_map")
    shards = set(map(str, named.values())) if isinstance(named, dict) else set()
    return [name for name in files if name in shards and name.endswith(".safetensors")]


def _choose(repository: str, files: Sequence[str], wanted: str | None) -> str:
    """The GGUF file that is meant, or WHOLE_FOLDER for safetensors."""
    is_whole = "config.json" in files and any(name.endswith(".safetensors") for name in files)
    if wanted is None and is_whole:
        return WHOLE_FOLDER
    return choose_gguf(repository, [name for name in files if name.endswith(".gguf")], wanted)


def _cached(hub: Any, repository: str) -> Path | None:
    """The folder of the newest revision in the client's cache, if it has any."""
    try:
        cached = hub.scan_cache_dir(hub.constants.HF_HUB_CACHE).repos
    except hub.errors.CacheNotFound:
        return None
    revisions = [own for repo in cached if repo.repo_id == repository for own in repo.revisions]
    newest = max(revisions, key=lambda own: float(own.last_modified), default=None)
    return None if newest is None else Path(newest.snapshot_path)


def choose_gguf(repository: str, files: Sequence[str], wanted: str | None) -> str:
    """The file of this name or quantization among a repository's GGUF files; without one, a good one.

    A draft head that lies beside a model is found by its name only.
    """
    files = [name for name in files if not BESIDE.search(name)]
    models = [name for name in files if not HEAD.search(name) or wanted in (name, Path(name).name)]
    files = models or files
    if not files:
        raise ModelError(
            f"{repository} has neither safetensors with a config.json nor GGUF files. Pickled weights can "
            "hold code and are never loaded: choose a repository with safetensors or GGUF."
        )
    whole = [name for name in files if _part(name) == 1]  # of split files the first part
    if not whole:
        raise ModelError(
            f"{repository} lacks the first part of {min(files)}: fetch all parts into one folder."
        )
    kinds = {name: kind.upper() for name in whole if (kind := _quantization(name))}
    if wanted is not None:
        found = [name for name in whole if wanted in (name, Path(name).name)]
        found = found or [name for name in whole if _is_of(name, wanted)]
    else:
        known = (name for kind in PREFERRED for name in whole if kinds.get(name) == kind)
        found = [next(known, whole[0])]
    if len(found) == 1:
        return found[0]
    names = sorted(set(kinds.values())) or sorted(whole)
    there = ", ".join(names[:MAX_NAMES_IN_ERROR])
    problem = f"has several files of {wanted!r}: give a file's name" if found else f"has no {wanted!r}"
    raise ModelError(f"{repository} {problem}. It has {there}. Write {repository}:{names[0]}.")


def _is_of(name: str, wanted: str) -> bool:
    """Whether a file's name ends with a quantization, also with its maker's mark (UD-Q4_K_XL)."""
    stem = SPLIT.sub("", Path(name).stem).lower()
    return re.search(rf"(^|[.-]){re.escape(wanted.lower())}$", stem) is not None


def _quantization(name: str) -> str | None:
    """The quantization that a file's name ends with."""
    found = QUANTIZATION.findall(SPLIT.sub("", Path(name).stem))
    return found[-1] if found else None


def _part(name: str) -> int:
    """The number of a part of a split file; 1 for other files."""
    match = SPLIT.search(Path(name).stem)
    return int(match[1]) if match else 1


def _is_unreachable(error: Exception) -> bool:
    """Whether the hub was not asked, was not reached or is out of order."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return bool(_kinds(error) & UNREACHABLE) or status >= 500


def _kinds(error: BaseException | None) -> set[str]:
    """The names of the classes of an error and of its causes: those of the client's HTTP library too."""
    kinds: set[str] = set()
    while error is not None:
        kinds |= {kind.__name__ for kind in type(error).__mro__}
        error = error.__cause__ or error.__context__
    return kinds
