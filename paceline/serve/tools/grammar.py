"""The grammar of an answer that may or must call tools, in llguidance's variant of Lark.

    start: TEXT | begin calls
    calls: call (between call)* end
    call: "{name, arguments: " arguments_0 "}" | ...
    arguments_0: %json {the tool's schema}

Once an answer has begun a call, it can only continue with a valid call of a declared tool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.serve.tools.channels import Channels
from paceline.serve.tools.declared import Tool, ToolChoice
from paceline.serve.tools.reasoning import ReasoningFormat
from paceline.serve.tools.rules import escaped, json_rule, literal
from paceline.serve.tools.tool_format import FENCE_END, FENCE_NAME_END, FENCE_START, ToolFormat

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer


def special_tokens(texts: Iterable[str], vocabulary: Tokenizer) -> dict[str, int]:
    """Those of a format's texts that are special tokens here: a grammar must refer to them by id."""
    ids = {text: vocabulary.id_of(text) for text in texts}
    return {text: token for text, token in ids.items() if token is not None and vocabulary.is_special(token)}


def answer_grammar(
    format: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    content: Mapping[str, Any] | None,
    special: Mapping[str, int],
    reasoning: ReasoningFormat | None = None,
) -> str:
    """The grammar of an answer: content or calls, as the choice allows.

    `content` is the JSON schema of the content, if it has one; `special` has the special tokens of the format
    and of the marks around `reasoning`: a text cannot contain those, so they need a rule.
    """
    before, after = (f"({literal(text, special)})?" if text else "" for text in format.around)
    begin, between, end = (literal(text, special) for text in (format.begin, format.between, format.end))
    begin, end = f"{before} {begin}", f"{end} {after}"
    thought = _thought(reasoning, special)
    opened, closed = _answer_marks(reasoning, special)
    is_single = choice.single or format.single
    lines = [f"calls: call {end}" if is_single else f"calls: call ({between} call)* {end}"]
    if format.channels and any(token in format.channels.final for token in special):
        lines += _channels(format.channels, begin, choice, content, special)
    elif choice.mode == "required":
        lines.append(f"start: {begin} calls")
    elif content is not None:
        lines += [f"start: {opened} content {closed} | {begin} calls", f"content: {json_rule(content)}"]
    elif not format.marker:
        starts = {text[0] for text in (format.opening, format.around[0]) if text and text not in special}
        lines += [
            f"start: TEXT? | {begin} calls",
            f"TEXT: /[^{escaped(''.join(sorted(starts)))}](?s:.*)/",
        ]
    elif format.marker in special:
        lines += [f"start: {thought} {opened} (TEXT {closed} | TEXT? {begin} calls)", "TEXT: /(?s:.*)/"]
    else:  # the marker ends the text before it; only a lazy lexeme matches it in time
        rest = literal(format.begin.removeprefix(format.marker), special)
        lines += [
            f"start: {thought} TEXT | {thought} marked {rest} calls" + (" | fenced" if format.fenced else ""),
            "TEXT: /(?s:.*)/",
            f"marked[lazy]: /(?s:.*){escaped(format.marker)}/",
        ]
        lines += _fenced(tools) if format.fenced else []
    heads = [_head(format, tool.name, special) for tool in tools]
    call_end = literal(format.call_end, special)
    lines.append("call: " + " | ".join(f"{head} arguments_{n} {call_end}" for n, head in enumerate(heads)))
    for n, tool in enumerate(tools):
        if format.notation is None:
            lines.append(f"arguments_{n}: {json_rule(tool.schema())}")
        else:
            lines += format.notation.rules(f"arguments_{n}", tool.schema(), special)
    return "\n".join(lines) + "\n"


def _head(format: ToolFormat, name: str, special: Mapping[str, int]) -> str:
    """What stands before a call's arguments."""
    written = format.written_id
    if written is not None:
        start, rest = (
            literal(format.call_start, special),
            literal(written.end + name + format.name_end, special),
        )
        return f"{start} /{written.pattern}/ {rest}"
    if not format.counted:
        return literal(format.call_start + name + format.name_end, special)
    # models count the calls of the whole conversation
    start = literal(f"{format.call_start}{name}:", special)
    return f"{start} /[0-9]+/ {literal(format.name_end, special)}"


def _thought(reasoning: ReasoningFormat | None, special: Mapping[str, int]) -> str:
    """Reasoning before the answer, whose first mark may be in the prompt; nothing if its marks are texts."""
    if reasoning is None or reasoning.end not in special:
        return ""
    return f"({literal(reasoning.begin, special)}? /(?s:.+)/? {literal(reasoning.end, special)})?"


def _answer_marks(reasoning: ReasoningFormat | None, special: Mapping[str, int]) -> tuple[str, str]:
    """What may stand before and after an answer; nothing if these marks are texts, as any text may be."""
    if reasoning is None or reasoning.answer_end not in special:
        return "", ""
    begins = " | ".join(literal(mark, special) for mark in reasoning.answer_begins)
    return rf"(/\s+/? ({begins}))?", f"({literal(reasoning.answer_end, special)})?"


def _channels(
    channels: Channels,
    begin: str,
    choice: ToolChoice,
    content: Mapping[str, Any] | None,
    special: Mapping[str, int],
) -> list[str]:
    """Rules for an answer of messages: thoughts and remarks, then the final one or calls."""
    reasoning, remark, header, following = (
        literal(text, special)
        for text in (channels.reasoning, channels.remark, channels.final, channels.following)
    )
    final = "TEXT?" if content is None else "content"
    # a remark is free text: one with the final message's header would let that be free, too
    headers = reasoning if content is not None and remark == header else f"({reasoning} | {remark})"
    end = f"({literal(channels.last_end, special)})?" if channels.last_end else ""
    last = f"{begin} calls" if choice.mode == "required" else f"{begin} calls | {header} {final} {end}"
    plain = "" if choice.mode == "required" else " | TEXT?" if content is None else " | content"
    return [
        f"start: message* last{plain}",
        f"message: {headers} TEXT? {following}",
        f"last: {last}",
        "TEXT: /(?s:.+)/",
        *([] if content is None else [f"content: {json_rule(content)}"]),
    ]


def _fenced(tools: Sequence[Tool]) -> list[str]:
    """Rules for an answer that is one call in a fenced JSON block; any other block is text."""
    end = literal(FENCE_END, {})
    heads = [literal(FENCE_START + tool.name + FENCE_NAME_END, {}) for tool in tools]
    return [
        "fenced: " + " | ".join(f"fence_{n} arguments_{n} {end}" for n in range(len(tools))),
        *(f"fence_{n}[lazy]: {head}" for n, head in enumerate(heads)),
    ]
