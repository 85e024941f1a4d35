"""Flags of vLLM that paceline does not have, and what a user who types one does instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.errors import ConfigError

INSTEAD = {
    "--model": "The model is the first argument, without a flag.",
    "--trust-remote-code": "Leave it out: code of checkpoints is never run.",
    "--enforce-eager": "Leave it out; the torch backend (--backend torch) has no CUDA graphs.",
    "--enable-auto-tool-choice": "Leave it out: tools need no flag.",
    "--reasoning-parser": "Leave it out: a model's chat template tells how it marks what it thinks.",
    "--chat-template": "The model's own is used; put another into its folder as chat_template.jinja.",
    "--enable-lora": "Leave it out: --lora-modules NAME=FOLDER is enough.",
    "--max-lora-rank": "Leave it out: adapters of any rank are served.",
    "--data-parallel-size": "Use --replicas.",
    "--pipeline-parallel-size": "Layers cannot be divided; use --tensor-parallel-size.",
    "--enable-chunked-prefill": "Leave it out: prompts are computed in chunks of --max-num-batched-tokens.",
    "--block-size": "Leave it out: the backend decides how many tokens a page of the KV cache has.",
    "--kv-cache-dtype": "Leave it out: keys and values are not quantized.",
    "--swap-space": "Leave it out: what a preempted request had computed is computed again.",
    "--speculative-model": "Use --draft model:PATH, or eagle3:PATH for a head.",
    "--num-speculative-tokens": "Put num_speculative_tokens into --speculative-config.",
    "--guided-decoding-backend": "Leave it out: there is one.",
    "--disable-log-requests": "Use --log-level warning.",
    "--uvicorn-log-level": "Use --log-level.",
    "--allowed-origins": "Use --cors-origin, once for each.",
}


def refuse_vllm_flags(arguments: Sequence[str], known: Collection[str]) -> None:
    """ConfigError with what to do instead, if a flag is one of vLLM's and none of the command's `known`."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in INSTEAD and flag not in known:
            raise ConfigError(f"{flag} is a flag of vLLM that paceline does not have. {INSTEAD[flag]}")
