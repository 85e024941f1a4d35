"""The grammar of an answer that may or must call tools, in llguidance's variant of Lark.

    start: TEXT | begin calls
    calls: call (between call)* end
    call: "{name, arguments: " arguments_0 "}" | ...
    arguments_0: %json {the tool's schema}

Once an answer has begun a call, it can only continue with a valid call of a declared tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline.serve.tools.declared import Tool, ToolChoice
from paceline.serve.tools.formats import FENCE_END, FENCE_NAME_END, FENCE_START, ToolFormat


class Vocabulary(Protocol):
    """The part of a tokenizer that the grammar needs."""

    def id_of(self, token: str) -> int | None: ...

    def is_special(self, token_id: int) -> bool: ...


def special_tokens(format: ToolFormat, vocabulary: Vocabulary) -> dict[str, int]:
    """The format's texts that are special tokens here: a grammar must refer to those by id."""
    ids = {text: vocabulary.id_of(text) for text in format.tokens}
    return {text: token for text, token in ids.items() if token is not None and vocabulary.is_special(token)}


def answer_grammar(
    format: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    content: Mapping[str, Any] | None,
    special: Mapping[str, int],
) -> str:
    """The grammar of an answer: content or calls, as the choice allows.

    `content` is the JSON schema of the content, if it has one; `special` is the result of
    special_tokens.
    """
    begin, between, end = (_literal(text, special) for text in (format.begin, format.between, format.end))
    is_single = choice.single or format.single
    lines = [f"calls: call {end}" if is_single else f"calls: call ({between} call)* {end}"]
    if format.channels and "<|channel|>" in special:
        lines += _channels(begin, choice, content, special)
    elif choice.mode == "required":
        lines.append(f"start: {begin} calls")
    elif content is not None:
        lines += [f"start: content | {begin} calls", f"content: {_json(content)}"]
    elif not format.marker:
        lines += [f"start: TEXT? | {begin} calls", r"TEXT: /[^{](?s:.*)/"]
    elif format.marker in special:
        lines += [f"start: TEXT | TEXT? {begin} calls", "TEXT: /(?s:.*)/"]
    else:  # the marker ends the text before it; only a lazy lexeme matches it in time
        rest = _literal(format.begin.removeprefix(format.marker), special)
        lines += [
            f"start: TEXT | marked {rest} calls" + (" | fenced" if format.fenced else ""),
            "TEXT: /(?s:.*)/",
            f"marked[lazy]: /(?s:.*){_escaped(format.marker)}/",
        ]
        lines += _fenced(tools) if format.fenced else []
    heads = [_literal(format.call_start + tool.name + format.name_end, special) for tool in tools]
    call_end = _literal(format.call_end, special)
    lines.append("call: " + " | ".join(f"{head} arguments_{n} {call_end}" for n, head in enumerate(heads)))
    lines += [f"arguments_{n}: {_json(tool.schema())}" for n, tool in enumerate(tools)]
    return "\n".join(lines) + "\n"


def _channels(
    begin: str, choice: ToolChoice, content: Mapping[str, Any] | None, special: Mapping[str, int]
) -> list[str]:
    """Rules for an answer of messages: thoughts and remarks, then the final one or calls."""

    def header(channel: str) -> str:
        return _literal(f"<|channel|>{channel}<|message|>", special)

    following = _literal("<|end|><|start|>assistant", special)
    final = "TEXT?" if content is None else "content"
    last = f"{begin} calls" if choice.mode == "required" else f"{begin} calls | {header('final')} {final}"
    plain = "" if choice.mode == "required" else " | TEXT?" if content is None else " | content"
    return [
        f"start: message* last{plain}",
        f"message: ({header('analysis')} | {header('commentary')}) TEXT? {following}",
        f"last: {last}",
        "TEXT: /(?s:.+)/",
        *([] if content is None else [f"content: {_json(content)}"]),
    ]


def _fenced(tools: Sequence[Tool]) -> list[str]:
    """Rules for an answer that is one call in a fenced JSON block; any other block is text."""
    end = _literal(FENCE_END, {})
    heads = [_literal(FENCE_START + tool.name + FENCE_NAME_END, {}) for tool in tools]
    return [
        "fenced: " + " | ".join(f"fence_{n} arguments_{n} {end}" for n in range(len(tools))),
        *(f"fence_{n}[lazy]: {head}" for n, head in enumerate(heads)),
    ]


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(schema)


def _literal(text: str, special: Mapping[str, int]) -> str:
    """A literal in a rule; special tokens in it by id."""
    if not text:
        return ""
    if not special:
        return json.dumps(text)
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def _escaped(text: str) -> str:
    """The text escaped for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")
