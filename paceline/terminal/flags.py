"""The flags that commands share, declared once and named as in Python: max_tokens is --max-tokens.

A command takes a whole group as one dict:

    @app.command()
    @with_flags(engine=ENGINE, sampling=having(SAMPLING, max_tokens=256))
    def generate(prompt: ..., engine: Options, sampling: Options) -> None: ...

Defaults are those of the Python API, repeated here because importing it would make `--help` slow;
a test holds the two together.
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
    """One option of the Python API on the command line."""

    name: str  # as Python spells it
    kind: Any
    default: Any
    help: str
    spelling: str | None = None  # None: -- and the name; a switch may have "--on/--off"; several: "--a --b"

    def parameter(self) -> inspect.Parameter:
        """The flag as a parameter that typer understands."""
        spelling = self.spelling or "--" + self.name.replace("_", "-")
        annotation = Annotated[self.kind, typer.Option(*spelling.split(), help=self.help)]  # type: ignore[name-defined]
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=annotation
        )


Group: TypeAlias = tuple[Flag, ...]

ENGINE: Group = (
    Flag("backend", str, "auto", "auto, cpu (compiled), torch (the reference; also CUDA) or cuda (kernels)."),
    Flag("dtype", str, "auto", "Of torch: auto, float32 or bfloat16; of cuda: auto, bfloat16 or float16."),
    Flag(
        "quantization",
        str,
        "auto",
        "native (a file's own blocks), int8 or none; of cuda fp8 and int4 too. auto: what suits the backend.",
    ),
    Flag("device", str, "cpu", "cpu, or cuda for the backends torch and cuda."),
    Flag("threads", int | None, None, "How many cores to use; all, if left out."),
    Flag(
        "exact",
        bool,
        False,
        "Refuse what cannot promise the same bytes, drafted or not, alone or not: torch, other rules.",
        "--exact",
    ),
    Flag("tokenizer", str | None, None, "Take the tokenizer from another model."),
    Flag("max_model_len", int | None, None, "Most tokens of prompt and output together."),
    Flag("max_num_seqs", int, 16, "Most requests that run at once."),
    Flag("max_num_batched_tokens", int, 512, "Most tokens of one pass over the model."),
    Flag("kv_cache_memory_bytes", int | None, None, "Memory for keys and values."),
    Flag("gpu_memory_utilization", float, 0.9, "Of cuda: the share of the GPU's memory to use in all."),
    Flag(
        "enable_prefix_caching",
        bool,
        True,
        "Reuse what earlier prompts have in common with this one.",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    ),
    Flag(
        "speculative_config",
        str,
        "auto",
        "What drafts: auto (copies and the head that is shipped for the model, where that pays), off, ngram, "
        "suffix, eagle3, model:PATH, or JSON such as "
        '\'{"method": "suffix", "num_speculative_tokens": 8}\'.',
        "--speculative-config --draft",
    ),
    Flag(
        "log_decisions", str | None, None, "With --draft auto: a file that says why it drafts what it drafts."
    ),
    Flag(
        "share_suffix_cache",
        str | None,
        None,
        "What suffix drafts from later, in requests of the same cache_salt: responses (the default), prompts "
        "(ends of prompts too) or off (each request's own text only).",
    ),
)

SAMPLING: Group = (
    Flag("temperature", float, 1.0, "0 is greedy: always the likeliest token."),
    *(Flag(name, own.kind, getattr(KEEPS_ALL, name), own.help) for name, own in OPTIONS.items()),
    Flag("repetition_penalty", float, 1.0, "Above 1 makes tokens of prompt and output less likely."),
    Flag("presence_penalty", float, 0.0, "-2 to 2: against tokens that are in the output."),
    Flag("frequency_penalty", float, 0.0, "-2 to 2: the same, for each time they are in it."),
    Flag("logit_bias", str | None, None, 'Added to the logits of token ids, as JSON: {"42": -100}.'),
    Flag("seed", int | None, None, "The same seed gives the same text, whatever else runs."),
    Flag("n", int, 1, "How many outputs for each prompt."),
    Flag("stop", list[str] | None, None, "Stop before this text. May be repeated."),
    Flag("stop_token_ids", list[int] | None, None, "Stop at this token id. May be repeated."),
    Flag("min_tokens", int, 0, "Neither end nor stop before this many tokens."),
    Flag("max_tokens", int | None, 16, "Stop after this many tokens."),
    Flag("ignore_eos", bool, False, "Go on when the model says it is done.", "--ignore-eos"),
    Flag(
        "logprobs", int | None, None, "Log-probabilities of each token and of this many likeliest (--json)."
    ),
    Flag("prompt_logprobs", int | None, None, "The same for the tokens of the prompt (--json)."),
    Flag(
        "skip_special_tokens",
        bool,
        True,
        "Leave special tokens out of the text.",
        "--skip-special-tokens/--no-skip-special-tokens",
    ),
    Flag(
        "include_stop_str_in_output",
        bool,
        False,
        "Keep the text that stopped the output in it.",
        "--include-stop-str-in-output",
    ),
)

SEED = Flag("seed", int, 0, "Of requests that bring no seed of their own.")

SERVER: Group = (
    Flag("host", str, "127.0.0.1", "Address to listen on; 0.0.0.0 for all of this machine's."),
    Flag("port", int, 8000, "Port to listen on; 0 takes one that is free."),
    Flag(
        "api_key",
        list[str] | None,
        None,
        "Clients must send this key. May be repeated; PACELINE_API_KEY is one more.",
    ),
    Flag(
        "share_cache_across_keys",
        bool,
        False,
        "Let clients with different API keys share the prefix cache and past responses.",
        "--share-cache-across-keys",
    ),
    Flag("served_model_name", list[str] | None, None, "What clients call the model. May be repeated."),
    Flag("max_queue", int, 256, "Most requests that wait; more get 429."),
    Flag("max_connections", int, 512, "Most connections; more get 503."),
    Flag("max_body_bytes", int, 4 * 1024 * 1024, "Most bytes of a request; more gets 413."),
    Flag("request_timeout", float, 600.0, "Seconds until a request is aborted; 0: never."),
    Flag("client_timeout", float, 60.0, "Seconds for a client to send its request, or to read its answer."),
    Flag("timeout_keep_alive", int, 30, "Seconds until a connection without requests is closed."),
    Flag("drain_timeout", float, 30.0, "Seconds that requests at hand have to end after SIGTERM."),
    Flag("stuck_timeout", float, 120.0, "Seconds without the end of a step after which /health answers 503."),
    Flag("cors_origin", list[str] | None, None, "Let pages of this origin call. May be repeated; * is all."),
    Flag("tool_call_parser", str | None, None, "How the model writes tool calls; else by its template."),
    Flag("max_segments", int, 32, "Most segments that metrics tell apart."),
    Flag("root_path", str, "", "The path under which a proxy offers this server."),
    Flag("log_level", str, "info", "debug, info, warning or error."),
    Flag("log_format", str, "auto", "json, text, or auto: text on a terminal."),
)

STRUCTURE: Group = (
    Flag("json_schema", str | None, None, "Answer with JSON by this schema: JSON, or a file that has it."),
    Flag("json_object", bool, False, "Answer with a JSON object.", "--json-object"),
    Flag("regex", str | None, None, "Answer with what this regular expression matches."),
    Flag("choice", list[str] | None, None, "Answer with one of these texts. May be repeated."),
    Flag("grammar", str | None, None, "Answer by the Lark or GBNF grammar in this file."),
)


def having(group: Group, **defaults: Any) -> Group:
    """The group with other defaults."""
    return tuple(
        replace(flag, default=defaults[flag.name]) if flag.name in defaults else flag for flag in group
    )


def without(group: Group, *names: str) -> Group:
    """The group without these flags, for a command where they make no sense."""
    return tuple(flag for flag in group if flag.name not in names)


def with_flags(**groups: Group) -> Callable[[Command], Command]:
    """A decorator: the command's parameter of each group's name is a dict of that group's flags."""

    def decorate(command: Command) -> Command:
        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in groups
        ]
        parameters = [*own, *(flag.parameter() for group in groups.values() for flag in group)]

        @functools.wraps(command)
        def collected(**values: Any) -> None:
            for group, members in groups.items():
                values[group] = {flag.name: values.pop(flag.name) for flag in members}
            command(**values)

        collected.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        collected.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return collected

    return decorate
