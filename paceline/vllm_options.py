"""Options of vLLM that paceline does not have, and what to do instead."""

from __future__ import annotations

INSTEAD = {
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


def instead_of(option: str) -> str | None:
    """The error message for this option or flag; None if vLLM does not have it either."""
    hint = INSTEAD.get(option.removeprefix("--").replace("-", "_"))
    return None if hint is None else f"{option} is an option of vLLM that paceline does not have. {hint}"
