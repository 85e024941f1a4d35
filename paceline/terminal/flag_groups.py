"""The groups of flags that several commands share: engine, sampling, server, learning, replicas, structure.

Defaults are those of the Python API, repeated here because importing it would make `--help` slow;
a test compares the two.
"""

from __future__ import annotations

from paceline.core.truncation import KEEPS_ALL, OPTIONS
from paceline.terminal.flags import Flag, Group, by_topic, topic

ENGINE: Group = (
    Flag(
        "backend",
        str,
        "auto",
        "auto (cuda if there is a GPU that it can use, else cpu), cpu (compiled), cuda (GPU kernels) or "
        "torch (slow reference).",
    ),
    Flag("dtype", str, "auto", "torch: auto, float32 or bfloat16; cuda: auto, bfloat16 or float16."),
    Flag(
        "quantization",
        str,
        "auto",
        "Format of weights: int8, int4, none, native (the file's own blocks; cpu, cuda) or fp8 (torch, "
        "cuda). auto: chosen for the backend.",
    ),
    Flag(
        "device",
        str,
        "auto",
        "auto (the backend's own), cpu, cuda or cuda:N. cuda alone selects the cuda backend.",
    ),
    Flag("threads", int | None, None, "Number of CPU cores to use. Default: all."),
    Flag(
        "tensor_parallel_size",
        int,
        1,
        "Processes that share the model, with the bytes of one (torch and cuda backends).",
    ),
    Flag(
        "exact",
        bool,
        False,
        "Refuse settings that do not give byte-identical output: the torch backend, sampled verification.",
        "--exact",
    ),
    Flag("tokenizer", str | None, None, "Model to take the tokenizer from. Default: the model itself."),
    Flag(
        "max_model_len",
        int | None,
        None,
        "Maximum tokens of prompt and output. Default: the model's.",
    ),
    Flag("max_num_seqs", int, 16, "Maximum number of concurrent requests; others wait."),
    Flag(
        "max_num_batched_tokens",
        int | None,
        None,
        "Maximum number of tokens in one pass. Default: 512, with the cuda backend 2048.",
    ),
    Flag(
        "kv_cache_memory_bytes",
        int | None,
        None,
        "Bytes for the KV cache. Default: by available memory.",
    ),
    Flag("gpu_memory_utilization", float, 0.9, "Fraction of GPU memory to use (cuda backend only)."),
    Flag(
        "enable_prefix_caching",
        bool,
        True,
        "Reuse the KV cache of earlier prompts with the same beginning.",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    ),
    Flag(
        "speculative_config",
        str,
        "auto",
        "Drafting: auto (whatever gains), off, ngram, suffix, shipped (the model's own head), eagle3:PATH, "
        "model:PATH, or JSON as vLLM takes it.",
        "--speculative-config --draft",
    ),
    Flag(
        "log_decisions",
        str | None,
        None,
        "File to log each decision of --draft auto to, with its reason.",
    ),
    Flag(
        "share_suffix_cache",
        str | None,
        None,
        "What suffix drafting copies from, besides the request's own text: responses (default) of the same "
        "cache_salt, prompts (these and ends of prompts), or off.",
    ),
)

SAMPLING: Group = (
    Flag("temperature", float, 1.0, "Sampling temperature; 0 is greedy."),
    *(Flag(name, option.kind, getattr(KEEPS_ALL, name), option.help) for name, option in OPTIONS.items()),
    Flag("repetition_penalty", float, 1.0, "Above 1: tokens of prompt and output become less likely."),
    Flag("presence_penalty", float, 0.0, "From -2 to 2: subtracted from the logits of tokens in the output."),
    Flag("frequency_penalty", float, 0.0, "From -2 to 2: the same, times the number of occurrences."),
    Flag("logit_bias", str | None, None, 'Added to the logits of token ids, as JSON: {"42": -100}.'),
    Flag("allowed_token_ids", list[int] | None, None, "Sample only this token id. May be repeated."),
    Flag("bad_words", list[str] | None, None, "Never write this word. May be repeated."),
    Flag("seed", int | None, None, "The same seed gives the same text, whatever else is running."),
    Flag("n", int, 1, "Number of outputs per prompt."),
    Flag("stop", list[str] | None, None, "Stop at this text. May be repeated."),
    Flag("stop_token_ids", list[int] | None, None, "Stop at this token id. May be repeated."),
    Flag("min_tokens", int, 0, "Do not stop before this many tokens."),
    Flag("max_tokens", int | None, 16, "Stop after this many tokens."),
    Flag("ignore_eos", bool, False, "Do not stop at the end-of-sequence token.", "--ignore-eos"),
    Flag(
        "logprobs",
        int | None,
        None,
        "Return log-probabilities of each token and of this many likeliest ones (with --json).",
    ),
    Flag("prompt_logprobs", int | None, None, "The same for the tokens of the prompt (with --json)."),
    Flag(
        "skip_special_tokens",
        bool,
        True,
        "Omit special tokens from the text.",
        "--skip-special-tokens/--no-skip-special-tokens",
    ),
    Flag(
        "include_stop_str_in_output",
        bool,
        False,
        "Include the matched stop string in the output.",
        "--include-stop-str-in-output",
    ),
)

SEED = Flag("seed", int, 0, "Seed of requests that have none.")

SERVER: Group = (
    Flag("host", str, "127.0.0.1", "Address to listen on; 0.0.0.0: all."),
    Flag("port", int, 8000, "Port to listen on; 0 for any free port."),
    Flag(
        "api_key",
        list[str] | None,
        None,
        "API key that clients must send. May be repeated; PACELINE_API_KEY adds one.",
    ),
    Flag(
        "share_cache_across_keys",
        bool,
        False,
        "Share the prefix cache and past responses between API keys.",
        "--share-cache-across-keys",
    ),
    Flag("served_model_name", list[str] | None, None, "Name of the model in the API. May be repeated."),
    Flag(
        "lora_modules",
        list[str] | None,
        None,
        "NAME=FOLDER of a LoRA adapter, for requests of MODEL:NAME. May be repeated.",
    ),
    Flag("routes", str | None, None, "TOML file of several models and of routes over them. Leave MODEL out."),
    Flag("max_queue", int, 256, "Maximum number of waiting requests; others get 429."),
    Flag("max_connections", int, 512, "Maximum number of connections; others get 503."),
    Flag(
        "max_body_bytes",
        int,
        4 * 1024 * 1024,
        "Maximum bytes of a request body; larger ones get 413.",
    ),
    Flag("request_timeout", float, 600.0, "Seconds until a request is aborted; 0: never."),
    Flag(
        "client_timeout",
        float,
        60.0,
        "Seconds for a client to send a request or read the answer.",
    ),
    Flag("timeout_keep_alive", int, 30, "Seconds until an idle connection is closed."),
    Flag("drain_timeout", float, 30.0, "Seconds to finish running requests after SIGTERM."),
    Flag("stuck_timeout", float, 120.0, "Seconds without a finished step until /health returns 503."),
    Flag(
        "cors_origin",
        list[str] | None,
        None,
        "Allow browsers on pages of this origin. May be repeated; * allows all.",
    ),
    Flag(
        "tool_call_parser",
        str | None,
        None,
        "Format of the model's tool calls. Default: found in its chat template.",
    ),
    Flag("max_segments", int, 32, "Maximum number of traffic segments with metrics of their own."),
    Flag(
        "metrics_prefix",
        str,
        "paceline",
        "vllm: serve the metrics that vLLM has too also under its names, for gateways that read those.",
    ),
    Flag(
        "kv_events_config",
        str | None,
        None,
        "Publish what the prefix cache stores and evicts, by ZeroMQ: JSON as vLLM takes it.",
    ),
    Flag(
        "kv_events_endpoint",
        str | None,
        None,
        "The same without JSON: the address, such as tcp://*:5557. What connects there reads the prompts.",
    ),
    Flag("kv_events_replay_endpoint", str | None, None, "Address at which missed KV events are replayed."),
    Flag("kv_events_topic", str | None, None, "Topic of KV events; llm-d expects kv@POD_IP:PORT@MODEL."),
    Flag(
        "otlp_endpoint",
        str | None,
        None,
        "Send OpenTelemetry traces to this OTLP/HTTP collector, such as http://localhost:4318.",
        "--otlp-endpoint --otlp-traces-endpoint",
    ),
    Flag("root_path", str, "", "Path prefix that a proxy adds, such as /llm."),
    Flag("log_level", str, "info", "debug, info, warning or error."),
    Flag("log_format", str, "auto", "json, text, or auto: text on a terminal."),
)

LEARN: Group = topic(
    "Learning",
    Flag("learn", bool, False, "Keep finished requests, and train the draft head on them.", "--learn"),
    Flag(
        "learn_dir",
        str | None,
        None,
        "Folder of what is kept and learned. Default: in PACELINE_HOME, one per model.",
    ),
    Flag("learn_share", float, 1.0, "Share of the finished requests to keep."),
    Flag("learn_max_bytes", int, 256 * 1024 * 1024, "Maximum bytes of kept requests; the oldest go first."),
    Flag("learn_max_age", float, 14.0, "Days after which a kept request is deleted."),
    Flag(
        "learn_salts",
        str,
        "off",
        "Requests with a cache_salt, or of one of several API keys: off (not kept), shared (kept, and the "
        "head of all trains on them) or own (kept, and it does not).",
    ),
    Flag(
        "learn_salt",
        str | None,
        None,
        "Learn only from requests with this cache_salt (of several API keys: of this key), and draft with "
        "the head only for them.",
    ),
    Flag("learn_skip_key", list[str] | None, None, "API key whose requests are not kept. May be repeated."),
    Flag(
        "learn_generic",
        list[str] | None,
        None,
        "File of `paceline train answers` to replay against forgetting. May be repeated.",
    ),
    Flag("learn_min_rows", int, 200, "New requests to keep before the head is trained on them."),
    Flag("learn_minutes", float, 20.0, "Minutes of a training, without the time that it waits."),
    Flag(
        "learn_max_running",
        int,
        2,
        "Training waits while more requests run than this, or while any waits.",
    ),
    Flag(
        "learn_max_slowdown",
        float,
        0.02,
        "Part of the tokens per second that training may cost; it works and waits in turns to keep that.",
    ),
    Flag(
        "learn_gpu_share",
        float,
        0.1,
        "Share of a GPU's time that training takes while no request runs.",
    ),
    Flag(
        "learn_redact",
        str | None,
        None,
        "MODULE:FUNCTION that gets each row, and returns what is kept of it, or None.",
    ),
)

SCALE: Group = topic(
    "Replicas",
    Flag("replicas", int | None, None, "Number of replicas, on Ray Serve. Default: one engine, without Ray."),
    Flag("autoscale", str | None, None, "MIN:MAX replicas, by load, on Ray Serve."),
    Flag(
        "ray_address",
        str | None,
        None,
        "Ray cluster to use: HOST:PORT or auto. Default: one is started on this machine.",
    ),
    Flag(
        "replica_timeout", float, 2.0, "Seconds without a message from a replica: its requests go to others."
    ),
    Flag(
        "target_ongoing_requests",
        float | None,
        None,
        "Requests per replica that --autoscale aims at. Default: half of --max-num-seqs.",
    ),
    Flag("upscale_delay", float, 5.0, "Seconds of high load before --autoscale adds a replica."),
    Flag("downscale_delay", float, 60.0, "Seconds of low load before --autoscale removes one."),
)

STRUCTURE: Group = topic(
    "Structured outputs",
    Flag("json_schema", str | None, None, "JSON schema of the answer: JSON, or a file."),
    Flag("json_object", bool, False, "Answer with any JSON object.", "--json-object"),
    Flag("regex", str | None, None, "Regular expression that the answer must match."),
    Flag("choice", list[str] | None, None, "Text that the answer may be. May be repeated."),
    Flag("grammar", str | None, None, "File with a Lark or GBNF grammar of the answer."),
)

ENGINE = by_topic(
    ENGINE,
    {
        "Model and backend": "backend dtype quantization device threads tensor_parallel_size exact tokenizer",
        "Memory and batching": "max_model_len max_num_seqs max_num_batched_tokens kv_cache_memory_bytes "
        "gpu_memory_utilization enable_prefix_caching",
        "Speculation": "log_decisions share_suffix_cache",
    },
)
SAMPLING = by_topic(
    SAMPLING,
    {
        "Sampling": "top_k top_p min_p repetition_penalty presence_penalty frequency_penalty logit_bias "
        "allowed_token_ids bad_words n",
        "Stopping": "stop stop_token_ids min_tokens ignore_eos include_stop_str_in_output",
        "What is returned": "logprobs prompt_logprobs skip_special_tokens",
    },
)
SERVER = by_topic(
    SERVER,
    {
        "Clients": "share_cache_across_keys cors_origin tool_call_parser root_path",
        "Limits and timeouts": "max_queue max_connections max_body_bytes request_timeout client_timeout "
        "timeout_keep_alive drain_timeout stuck_timeout",
        "Logs and metrics": "otlp_endpoint max_segments log_level log_format",
        "Gateways": "metrics_prefix kv_events_config kv_events_endpoint kv_events_replay_endpoint "
        "kv_events_topic",
    },
)
