"""The flags of `paceline simulate` that are of the whole engine."""

from __future__ import annotations

from pathlib import Path

from paceline.terminal.flags import Flag, Group

MACHINE: Group = (
    Flag("gpu", str | None, None, "A GPU to simulate: h200, h100, a100, l40s, l4, rtx4090, rtx3090."),
    Flag("bandwidth", float | None, None, "Its bytes a second, instead of the data sheet's."),
    Flag("flops", float | None, None, "Its operations a second, in the same way."),
    Flag("memory", float | None, None, "Its bytes of memory, in the same way."),
    Flag("overhead", float | None, None, "Seconds of a step beside the pass; 0.001 if left out."),
    Flag("params", float | None, None, "Parameters of the model on it; 8e9 if left out."),
    Flag("bits", float | None, None, "Of a weight; 16 if left out."),
    Flag("layers", int | None, None, "Of the model; as usual for its size if left out."),
    Flag("kv_bytes_per_token", float | None, None, "Keys and values of a token; by its layers if left out."),
    Flag("draft_params", float | None, None, "Of the draft head; 0.04 of the model's if left out. 0: free."),
)
TRAFFIC: Group = (
    Flag("concurrency", str | None, None, "Numbers of requests at once; 1,4,16,64,256 if left out."),
    Flag("input_tokens", int, 512, "Of a prompt."),
    Flag("output_tokens", int, 128, "Of an answer."),
    Flag("workload", str | None, None, "Prompts to take lengths from: see `paceline bench`. Needs a MODEL."),
    Flag("threads", int | None, None, "Of a MODEL that is measured; one for each core if left out."),
    Flag("max_num_batched_tokens", int | None, None, "Rows of a pass; 512, with a GPU 2048, if left out."),
)
DRAFTS: Group = (
    Flag("acceptance", str | None, None, "Instead of --alpha: shares right to depth 1, 2...: 0.6,0.4."),
    Flag("from_file", Path | None, None, "Or what `paceline bench --json FILE` found.", "--from"),
    Flag("methods", str | None, None, "Such as off,auto,chain:5; off, auto and one of --gamma if left out."),
    Flag("chances", bool, True, "Drafters say how sure they are.", "--chances/--no-chances"),
)
