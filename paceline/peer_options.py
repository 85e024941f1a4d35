"""Options of vLLM and llama.cpp that paceline does not have, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Collection

ENGINE_FLAG = "--max-model-len"  # commands that run an engine have it
NAMED = re.compile(r"--([a-z-]+)|\b([a-z]+_[a-z_]+)\b(?!\.)")  # a flag or option in a hint
VLLM = {
    # of the engine
    "trust_remote_code": "Leave it out: code of checkpoints is never run.",
    "enforce_eager": "Leave it out; the torch backend has no CUDA graphs.",
    "enable_lora": "Leave it out: lora_modules is enough.",
    "max_lora_rank": "Leave it out: adapters of any rank are served.",
    "pipeline_parallel_size": "Layers cannot be divided; use tensor_parallel_size.",
    "enable_chunked_prefill": "Leave it out: prompts are computed in chunks of max_num_batched_tokens.",
    "block_size": "Leave it out: the backend decides how many tokens a page of the KV cache has.",
    "kv_cache_dtype": "Leave it out: keys and values are not quantized.",
    "swap_space": "Leave it out: what a preempted request had computed is computed again.",
    "speculative_model": "Put it into speculative_config as model.",
    "num_speculative_tokens": "Put it into speculative_config.",
    "guided_decoding_backend": "Leave it out: there is one.",
    # of the server
    "model": "The model is the first argument, without a flag.",
    "data_parallel_size": "Use --replicas.",
    "enable_auto_tool_choice": "Leave it out: tools need no flag.",
    "reasoning_parser": "Leave it out: a model's chat template tells how it marks what it thinks.",
    "chat_template": "The model's own is used; put another into its folder as chat_template.jinja.",
    "disable_log_requests": "Use --log-level warning.",
    "uvicorn_log_level": "Use --log-level.",
    "allowed_origins": "Use --cors-origin, once for each.",
}


_MODEL = "The model is the first argument, without a flag: a .gguf file, or org/name:Q4_K_M."
_CONTEXT = "Use --max-model-len."
_GPU_LAYERS = "Leave it out: a model runs as a whole on a GPU or on the CPU; --backend chooses."
_ROWS = "Use --max-num-batched-tokens."
_LENGTH = "Use --max-tokens; clients of a server send max_tokens."
_DRAFT_MODEL = "Use --draft model:PATH, or of a draft head eagle3:PATH, dflash:, dspark: or assistant:."
_DRAFT_LENGTH = (
    """Use --draft '{"method": ..., "num_speculative_tokens": N}', or leave it out: auto chooses."""
)
_KV_TYPE = "Leave it out: keys and values are not quantized."

LLAMA_CPP = {
    "-m": _MODEL,
    "-hf": _MODEL,
    "--hf-repo": _MODEL,
    "-a": "Use --served-model-name.",
    "--alias": "Use --served-model-name.",
    "-c": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "-ngl": _GPU_LAYERS,
    "--gpu-layers": _GPU_LAYERS,
    "--n-gpu-layers": _GPU_LAYERS,
    "-t": "Use --threads.",
    "-np": "Use --max-num-seqs.",
    "--parallel": "Use --max-num-seqs.",
    "-b": _ROWS,
    "--batch-size": _ROWS,
    "-ub": _ROWS,
    "--ubatch-size": _ROWS,
    "-n": _LENGTH,
    "--n-predict": _LENGTH,
    "-p": "Use --prompt.",
    "-md": _DRAFT_MODEL,
    "--model-draft": _DRAFT_MODEL,
    "--spec-draft-model": _DRAFT_MODEL,
    "--spec-type": _DRAFT_MODEL,
    "--draft-max": _DRAFT_LENGTH,
    "--draft-min": _DRAFT_LENGTH,
    "-ctk": _KV_TYPE,
    "--cache-type-k": _KV_TYPE,
    "-ctv": _KV_TYPE,
    "--cache-type-v": _KV_TYPE,
    "-fa": "Leave it out: each backend has one attention.",
    "--flash-attn": "Leave it out: each backend has one attention.",
    "--jinja": "Leave it out: the model's own chat template is always used.",
    "--mlock": "Leave it out.",
    "--no-mmap": "Leave it out.",
}


def instead_of(option: str, flags: Collection[str] = (ENGINE_FLAG,)) -> str | None:
    """The error message for this option or flag; None if neither of them has it.

    `flags`: those of the command. A command that runs no engine gets only hints that name no flag or its
    own: `--max-num-batched-tokens` is not what `--batch-size` of a training means.
    """
    for peer, hint in (
        ("vLLM", VLLM.get(option.removeprefix("--").replace("-", "_"))),
        ("llama.cpp", LLAMA_CPP.get(option)),
    ):
        if hint is None:
            continue
        named = {"--" + "".join(names).replace("_", "-") for names in NAMED.findall(hint)}
        if ENGINE_FLAG in flags or named <= {*flags}:
            return f"{option} is an option of {peer} that paceline does not have. {hint}"
    return None
