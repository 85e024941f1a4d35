"""`paceline export`: a draft head in the format of another engine, and how to launch it there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError
from paceline.models.heads.checkpoint import WEIGHTS, load_head, write_head
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats import SPECULATIVE_TOKENS
from paceline.models.heads.registry import resolve_head

SGLANG_ALGORITHMS = {"eagle3": "EAGLE3", "eagle": "EAGLE", "dflash": "DFLASH", "dspark": "DSPARK"}


def export_head(
    name: str,
    folder: Path,
    form: str,
    target: str = "",
    quantization: str | None = None,
    force: bool = False,
) -> str:
    """Write a head, named as for resolve_head, into a folder. Returns the command that launches it there.

    `target` is what the other engine calls the head's target; `quantization` is of the written matrices. A
    folder that has a head is refused unless `force` is set.
    """
    source = resolve_head(name)
    head = load_head(source)
    if head.config.block is not None and head.config.fc_norm:
        raise ConfigError(
            f"{source} has a norm for each feature, which other engines do not know in parallel heads: train "
            "one for them with --no-fc-norm."
        )
    layers = head.config.feature_layers or ()
    if sorted(set(layers)) != list(layers):
        raise ConfigError(
            f"{source} reads the hidden states {', '.join(map(str, layers))}, but other engines give each "
            "one once, from the first layer to the last: train it again."
        )
    if folder.resolve() in (source.resolve(), source.resolve().parent):
        raise ConfigError(f"{folder} is where the head itself is: give another folder to write to.")
    taken = [file for file in (*WEIGHTS, "config.json") if (folder / file).exists()]
    if taken and not force:
        raise ConfigError(
            f"{folder} has a {taken[0]} already: give another folder, or --force to overwrite it."
        )
    write_head(head, folder, form, target, quantization)
    return LAUNCH[form](head.config, target or "TARGET", folder)


def _num_drafts(config: HeadConfig) -> int:
    return SPECULATIVE_TOKENS if config.block is None else config.block.num_drafts


def vllm_speculative_config(head: HeadConfig, folder: Path) -> dict[str, object]:
    """The `speculative_config` with which vLLM drafts with the head in this folder."""
    config = {"method": head.kind, "model": str(folder), "num_speculative_tokens": _num_drafts(head)}
    return config | ({} if head.mask_token_id is None else {"parallel_drafting": True})  # of P-EAGLE


def _vllm(head: HeadConfig, target: str, folder: Path) -> str:
    config = json.dumps(vllm_speculative_config(head, folder))
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"


def _sglang(head: HeadConfig, target: str, folder: Path) -> str:
    command = (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm "
        f"{SGLANG_ALGORITHMS[head.kind]} --speculative-draft-model-path {shlex.quote(str(folder))}"
    )
    if head.block is not None:  # the length is that of its block
        return command
    return (
        f"{command} --speculative-num-steps {SPECULATIVE_TOKENS} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {SPECULATIVE_TOKENS + 1}"
    )


# by format: the command for a head, a target and the head's folder
LAUNCH: dict[str, Callable[[HeadConfig, str, Path], str]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "speculators": _vllm,
}
