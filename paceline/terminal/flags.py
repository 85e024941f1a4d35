"""Flags that several commands share, declared once and named as in Python: max_tokens is --max-tokens.

A command takes a whole group as one dict:

    @app.command()
    @with_flags(engine=ENGINE, sampling=having(SAMPLING, max_tokens=256))
    def generate(prompt: ..., engine: Options, sampling: Options) -> None: ...

Defaults are those of the Python API, repeated here because importing it would make `--help` slow;
a test compares the two.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import typer

from paceline.core.truncation import KEEPS_ALL, OPTIONS

Options: TypeAlias = dict[str, Any]
Command = Callable[..., None]


@dataclass(frozen=True)
class Flag:
    """One option of the Python API as a command-line flag."""

    name: str  # as in Python
    kind: Any
    default: Any
    help: str
    spelling: str | None = None  # None: "--" and the name; a switch may have "--on/--off"; aliases: "--a --b"

    def parameter(self) -> inspect.Parameter:
        """The flag as a parameter for typer."""
        spelling = self.spelling or "--" + self.name.replace("_", "-")
        annotation = Annotated[self.kind, typer.Option(*spelling.split(), help=self.help)]  # type: ignore[name-defined]
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=annotation
        )


Group: TypeAlias = tuple[Flag, ...]

ENGINE: Group = (
    Flag(
        "backend",
        str,
        "auto",
        "auto, cpu (compiled), torch (reference; also on CUDA) or cuda (GPU kernels).",
    ),
    Flag("dtype", str, "auto", "torch: auto, float32 or bfloat16; cuda: auto, bfloat16 or float16."),
    Flag(
        "quantization",
        str,
        "auto",
        "native (the file's own blocks), int8 or none; cuda also fp8 and int4. auto: chosen for the backend.",
    ),
    Flag("device", str, "cpu", "cpu, or cuda for the backends torch and cuda."),
    Flag("threads", int | None, None, "Number of CPU cores to use. Default: all."),
    Flag(
        "exact",
        bool,
        False,
        "Refuse settings without byte-identical output (the torch backend, sampled verification rules).",
        "--exact",
    ),
    Flag("tokenizer", str | None, None, "Use the tokenizer of another model."),
    Flag("max_model_len", int | None, None, "Maximum tokens of prompt and output together."),
    Flag("max_num_seqs", int, 16, "Maximum number of requests that run at once."),
    Flag("max_num_batched_tokens", int, 512, "Maximum number of tokens in one pass."),
    Flag("kv_cache_memory_bytes", int | None, None, "Memory of the KV cache, in bytes."),
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
        "How to draft: auto (suffix and the model's shipped head, where they gain), off, ngram, "
        "suffix, eagle3, model:PATH, or JSON such as "
        '\'{"method": "suffix", "num_speculative_tokens": 8}\'.',
        "--speculative-config --draft",
    ),
    Flag(
        "log_decisions",
        str | None,
        None,
        "With --draft auto: a file for the reasons of its decisions.",
    ),
    Flag(
        "share_suffix_cache",
        str | None,
        None,
        "What suffix drafts from, within one cache_salt: past responses (responses, default), ends of "
        "prompts too (prompts), or each request's own text only (off).",
    ),
)

SAMPLING: Group = (
    Flag("temperature", float, 1.0, "0 is greedy: always the likeliest token."),
    *(Flag(name, option.kind, getattr(KEEPS_ALL, name), option.help) for name, option in OPTIONS.items()),
    Flag("repetition_penalty", float, 1.0, "Above 1: tokens of prompt and output become less likely."),
    Flag("presence_penalty", float, 0.0, "-2 to 2: subtracted from the logits of tokens in the output."),
    Flag("frequency_penalty", float, 0.0, "-2 to 2: the same, times the number of occurrences."),
    Flag("logit_bias", str | None, None, 'Added to the logits of token ids, as JSON: {"42": -100}.'),
    Flag("seed", int | None, None, "The same seed gives the same text, whatever else runs."),
    Flag("n", int, 1, "Number of outputs per prompt."),
    Flag("stop", list[str] | None, None, "Stop before this text. May be repeated."),
    Flag("stop_token_ids", list[int] | None, None, "Stop at this token id. May be repeated."),
    Flag("min_tokens", int, 0, "Do not stop before this many tokens."),
    Flag("max_tokens", int | None, 16, "Stop after this many tokens."),
    Flag("ignore_eos", bool, False, "Continue after the end-of-sequence token.", "--ignore-eos"),
    Flag(
        "logprobs",
        int | None,
        None,
        "Log-probabilities of each token and of this many likeliest tokens (--json).",
    ),
    Flag("prompt_logprobs", int | None, None, "The same for the tokens of the prompt (--json)."),
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

SEED = Flag("seed", int, 0, "Seed of requests that set none.")

SERVER: Group = (
    Flag("host", str, "127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces."),
    Flag("port", int, 8000, "Port to listen on; 0 for any free port."),
    Flag(
        "api_key",
        list[str] | None,
        None,
        "Clients must send this key. May be repeated; PACELINE_API_KEY adds one.",
    ),
    Flag(
        "share_cache_across_keys",
        bool,
        False,
        "Let clients with different API keys share the prefix cache and past responses.",
        "--share-cache-across-keys",
    ),
    Flag("served_model_name", list[str] | None, None, "Model name for clients. May be repeated."),
    Flag("max_queue", int, 256, "Maximum number of waiting requests; more get 429."),
    Flag("max_connections", int, 512, "Maximum number of connections; more get 503."),
    Flag(
        "max_body_bytes",
        int,
        4 * 1024 * 1024,
        "Maximum bytes of a request body; larger ones get 413.",
    ),
    Flag("request_timeout", float, 600.0, "Seconds until a request is aborted; 0: never."),
    Flag("client_timeout", float, 60.0, "Seconds for a client to send a request or read the answer."),
    Flag("timeout_keep_alive", int, 30, "Seconds until an idle connection is closed."),
    Flag("drain_timeout", float, 30.0, "Seconds to finish running requests after SIGTERM."),
    Flag("stuck_timeout", float, 120.0, "Seconds without a finished step until /health returns 503."),
    Flag(
        "cors_origin",
        list[str] | None,
        None,
        "Allow pages of this origin. May be repeated; * allows all.",
    ),
    Flag(
        "tool_call_parser",
        str | None,
        None,
        "Format of the model's tool calls. Default: by template.",
    ),
    Flag("max_segments", int, 32, "Maximum number of segments with their own metrics."),
    Flag("root_path", str, "", "Path prefix under which a proxy serves this server."),
    Flag("log_level", str, "info", "debug, info, warning or error."),
    Flag("log_format", str, "auto", "json, text, or auto: text on a terminal."),
)

STRUCTURE: Group = (
    Flag("json_schema", str | None, None, "Answer with JSON of this schema, given as JSON or as a file."),
    Flag("json_object", bool, False, "Answer with a JSON object.", "--json-object"),
    Flag("regex", str | None, None, "Answer with a match of this regular expression."),
    Flag("choice", list[str] | None, None, "Answer with one of these texts. May be repeated."),
    Flag("grammar", str | None, None, "Answer by the Lark or GBNF grammar in this file."),
)


def having(group: Group, **defaults: Any) -> Group:
    """The group with some defaults replaced."""
    return tuple(
        replace(flag, default=defaults[flag.name]) if flag.name in defaults else flag for flag in group
    )


def without(group: Group, *names: str) -> Group:
    """The group without these flags, for a command where they do not apply."""
    return tuple(flag for flag in group if flag.name not in names)


def with_flags(**groups: Group) -> Callable[[Command], Command]:
    """A decorator: the command's parameter named after a group receives a dict of the group's flags."""

    def decorate(command: Command) -> Command:
        hints = typing.get_type_hints(command, include_extras=True)
        command_parameters = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in groups
        ]
        parameters = [*command_parameters, *(flag.parameter() for group in groups.values() for flag in group)]

        @functools.wraps(command)
        def collected(**values: Any) -> None:
            for group, members in groups.items():
                values[group] = {flag.name: values.pop(flag.name) for flag in members}
            command(**values)

        collected.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        collected.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return collected

    return decorate
