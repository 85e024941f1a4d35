"""The flags of `paceline simulate`, by group."""

from __future__ import annotations

from pathlib import Path

from paceline.terminal.flags import PROMPT_FILE, Flag, Group, by_topic, topic

MACHINE: Group = (
    Flag(
        "gpu",
        str | None,
        None,
        "GPU to simulate: b200, h200, h100, a100, mi300x, l40s, l4, rtx4090 or rtx3090; several as in 4xh100 "
        "(tensor parallel).",
    ),
    Flag(
        "preset",
        str | None,
        None,
        "Model to simulate on the GPU, such as llama-3.1-70b or qwen3-30b-a3b. An unknown name lists all.",
        "--model",
    ),
    Flag("gpu_price", float | None, None, "Price of one GPU for one hour, for the cost of a million tokens."),
    Flag("params", float | None, None, "Parameters of a model without a preset. Default: 8e9."),
    Flag("bits", float | None, None, "Bits per weight. Default: the preset's, or 16."),
    Flag("layers", int | None, None, "Layers of a model without a preset. Default: usual for its size."),
    Flag(
        "kv_bytes_per_token",
        float | None,
        None,
        "KV cache bytes per token. Default: the preset's, or 8 heads of 128 per layer in 16 bits.",
    ),
    Flag(
        "draft_params",
        float | None,
        None,
        "Parameters of the draft head; 0 for look-ups, which are free. Default: an EAGLE-3 head for the "
        "preset, or 0.04 of --params.",
    ),
    Flag("bandwidth", float | None, None, "Memory bandwidth in bytes per second. Default: the data sheet's."),
    Flag("flops", float | None, None, "Dense bf16 operations per second. Default: the data sheet's."),
    Flag("memory", float | None, None, "Memory of one GPU in bytes. Default: the data sheet's."),
    Flag("overhead", float | None, None, "Seconds per step besides the pass. Default: 0.001."),
)
TRAFFIC: Group = (
    Flag("concurrency", str | None, None, "Numbers of concurrent requests. Default: 1,4,16,64,256."),
    Flag(
        "rate",
        str | None,
        None,
        "Requests per second (Poisson arrivals), such as 2,4,8; auto: from 25 to 110 % of saturation.",
    ),
    Flag(
        "slo",
        str | None,
        None,
        "Latency objective in milliseconds, such as ttft=500,tpot=50: find the highest request rate, or the "
        "smallest fleet, at which 90 % of requests meet it.",
    ),
    Flag("input_tokens", int, 512, "Tokens per prompt."),
    Flag("output_tokens", int, 128, "Tokens per answer."),
    Flag(
        "workload",
        str | None,
        None,
        "Prompts to take the lengths from, as of `paceline bench`. Needs a measured MODEL.",
        " ".join(PROMPT_FILE),
    ),
    Flag("threads", int | None, None, "CPU threads of a measured MODEL. Default: one per core."),
    Flag(
        "max_num_batched_tokens",
        int | None,
        None,
        "Maximum tokens in one pass. Default: 2048 with a --gpu, 512 with a MODEL.",
    ),
)
DRAFTS: Group = topic(
    "Drafts",
    Flag(
        "acceptance",
        str | None,
        None,
        "Instead of --alpha: fractions of drafts accepted down to depth 1, 2, ..., such as 0.6,0.4.",
    ),
    Flag("from_file", Path | None, None, "Take acceptance from a file of `paceline bench --json`.", "--from"),
    Flag(
        "methods",
        str | None,
        None,
        "Methods to compare, such as off,auto,chain:5. Default: off, auto and a chain of --gamma.",
    ),
    Flag("chances", bool, True, "Drafters report their confidence.", "--chances/--no-chances"),
)

FLEET: Group = topic(
    "Fleet",
    Flag(
        "replicas",
        str | None,
        None,
        "Simulate a fleet of this many replicas, or of a range such as 1..16: --slo finds the smallest.",
    ),
    Flag(
        "trace",
        Path | None,
        None,
        "Requests of the fleet: a .csv with TIMESTAMP, ContextTokens and GeneratedTokens, or a .jsonl with "
        "timestamp, input_length, output_length and hash_ids.",
    ),
    Flag("time_scale", float, 1.0, "Factor on the times of --trace: 0.1 replays ten times as fast."),
    Flag("limit", int | None, None, "Take only this many requests of --trace."),
    Flag(
        "shared_prefixes",
        str | None,
        None,
        "Prefixes that prompts of a .csv begin with, such as 32x1024: 32 of 1,024 tokens. Default: none.",
    ),
    Flag(
        "routing",
        str,
        "prefix",
        "Routing policies to compare: prefix, least-loaded, random; pooled is one replica as large as all.",
    ),
    Flag("max_num_seqs", int | None, None, "Requests per pass of a replica. Default: 256, with a MODEL 16."),
    Flag(
        "server",
        str | None,
        None,
        "Milliseconds that the server of a replica adds to its engine, per request, prompt_token, step "
        "(pass), token and row (prompt token of a pass), such as request=15,step=0.5. Default: none.",
    ),
    Flag("replica_price", float | None, None, "Price of one replica for one hour. Default: by --gpu-price."),
)

MACHINE = by_topic(
    MACHINE,
    {
        "Model": "params bits layers kv_bytes_per_token draft_params",
        "GPU": "bandwidth flops memory overhead",
    },
)
TRAFFIC = by_topic(TRAFFIC, {"Traffic": "input_tokens output_tokens workload threads max_num_batched_tokens"})
