"""`paceline generate`: prompts in, text or JSON out."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.core.params import SamplingParams
from paceline.engine.outputs import RequestOutput, request_output
from paceline.errors import RequestError
from paceline.llm import LLM
from paceline.terminal.flags import Options
from paceline.terminal.session import load, note, sampling_params, show, stream


def generate(
    model: str,
    texts: Sequence[str],
    files: Sequence[Path],
    engine: Options,
    sampling: Options,
    structure: Options,
    *,
    chat: bool,
    system: str | None,
    as_json: bool,
    stats: bool,
) -> None:
    """Generate and print the outputs. One prompt with one output is streamed."""
    params = sampling_params({**sampling, "structured_outputs": structured_outputs(structure)})
    if system is not None and not chat:
        raise RequestError("--system is a message of a chat: add --chat, or put the text into the prompt.")
    if not as_json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise RequestError("log-probabilities are shown with --json only: add it, or leave them out.")
    if not texts and not files and " " in model.strip() and not Path(model).exists():
        raise RequestError(
            f"{model[:80]!r} stands where the name of a model is expected. To continue that text: "
            f"paceline generate --prompt {shlex.quote(model[:80])}"
        )
    given = read_prompts(texts, files)
    llm = load(model, engine)
    tokenizer = llm.get_tokenizer()
    prompts: list[tuple[str, list[int]]] = []
    for text in given:
        if chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            text = tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])
        prompts.append((text, tokenizer.encode(text, add_special_tokens=not chat)))
    outputs = run(llm, prompts, params, streaming=not as_json)
    facts = statistics(llm, outputs)
    if as_json:
        document = {"model": model, "outputs": [asdict(output) for output in outputs], "stats": facts}
        print(json.dumps(document, indent=2, default=str))
    elif stats:
        note(in_words(facts))
    for output in outputs:
        for completion in output.outputs:
            if completion.error is not None:
                raise completion.error


def read_prompts(texts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """The prompts given as texts and as files; without any, one prompt from standard input.

    A file's or pipe's final line break is not part of the prompt.
    """
    prompts = list(texts)
    for path in files:
        try:
            prompts.append(_decoded(path.read_bytes(), str(path)))
        except OSError as error:
            raise RequestError(
                f"the prompt file {path} cannot be read: {error.strerror}. Check its name."
            ) from error
    if not prompts:
        piped = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
        if not piped:
            raise RequestError(
                "there is no prompt: give --prompt TEXT or --prompt-file FILE, or pipe one in."
            )
        prompts.append(_decoded(piped, "standard input"))
    for prompt in prompts:
        if not prompt:
            raise RequestError("a prompt is empty: give at least one character.")
    return prompts


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{where} is not UTF-8: byte {error.start} is {content[error.start]:#04x}. Convert it, "
            "for example with iconv."
        ) from error


def structured_outputs(options: Options) -> dict[str, Any] | None:
    """The structured_outputs option that the flags give; None if they give none."""
    schema, grammar = options["json_schema"], options["grammar"]
    if schema is not None and not schema.lstrip().startswith("{"):
        schema = _text_of("--json-schema", schema)
    asked = {
        "json": schema,
        "json_object": options["json_object"] or None,
        "regex": options["regex"],
        "choice": options["choice"] or None,
        "grammar": None if grammar is None else _text_of("--grammar", grammar),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return given or None


def _text_of(flag: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise RequestError(f"{flag} {path!r:.80} cannot be read as a file of text: {error}.") from None


def run(
    llm: LLM, prompts: Sequence[tuple[str, list[int]]], params: SamplingParams, streaming: bool
) -> list[RequestOutput]:
    """The outputs of all prompts; with `streaming`, printed as they arrive."""
    if streaming and len(prompts) == 1 and params.n == 1:
        ((text, token_ids),) = prompts
        request = stream(llm, token_ids, params, show)
        show("\n")
        return [request_output(text, [request], llm.get_tokenizer())]
    outputs = llm.generate(
        [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in prompts], params
    )
    if streaming:
        for number, output in enumerate(outputs, 1):
            for completion in output.outputs:
                which = f", output {completion.index + 1} of {params.n}" if params.n > 1 else ""
                show(f"[prompt {number} of {len(outputs)}{which}]\n{completion.text}\n")
    return outputs


def statistics(llm: LLM, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts, times, and what prefix cache and drafts saved."""
    start = min(output.metrics.arrival_time for output in outputs)
    first = min(output.metrics.first_token_time or start for output in outputs)
    end = max(output.metrics.finished_time or start for output in outputs)
    completions = [completion for output in outputs for completion in output.outputs]
    tokens = sum(len(completion.token_ids) for completion in completions)
    facts = llm.engine.stats
    drafts = [output.metrics.speculative for output in outputs]
    steps = sum(draft.num_spec_steps for draft in drafts)
    drafted = sum(draft.num_draft_tokens for draft in drafts)
    accepted = sum(draft.num_accepted_draft_tokens for draft in drafts)
    return {
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "output_tokens": tokens,
        "seconds": end - start,
        "seconds_to_first_token": first - start,
        "output_tokens_per_second": tokens / (end - start) if end > start else None,
        # decoding only: from each output's first token on, that token not counted
        "decode_tokens_per_second": (tokens - len(completions)) / (end - first) if end > first else None,
        "prefix_queries": facts.prefix_queries,
        "prefix_hits": facts.prefix_hits,
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / max(1, steps),
    }


def in_words(facts: dict[str, Any]) -> str:
    """The statistics as two lines, or three if there were drafts."""
    decode = facts["decode_tokens_per_second"]
    speed = f", {decode:.1f} tokens/s after the first" if decode else ""
    drafts = ""
    if facts["num_spec_steps"]:
        drafts = (
            f"\nspeculation: {facts['num_accepted_draft_tokens']} of {facts['num_draft_tokens']} drafted "
            f"tokens accepted, {facts['mean_acceptance_length']:.2f} tokens a drafted pass"
        )
    return (
        f"{facts['prompt_tokens']} prompt tokens, {facts['output_tokens']} output tokens in "
        f"{facts['seconds']:.2f} s: first after {facts['seconds_to_first_token']:.2f} s{speed}\n"
        f"prefix cache: {facts['prefix_hits']} of {facts['prefix_queries']} tokens found{drafts}"
    )
