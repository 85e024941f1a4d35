"""Channels: the marks of formats whose answers are messages with headers, some of which are reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Channels:
    """The headers of an answer's messages, and what stands between two messages."""

    reasoning: str  # the header of a thought
    remark: str  # the header of what is said before calls or the final message
    final: str  # the header of the last message
    following: str  # between a message and the next one's header
    starts: tuple[str, ...]  # texts that a header begins with
    bodies: tuple[str, ...]  # texts that a header ends with
    ends: tuple[str, ...]  # texts that end a message
    thought: str  # a part of the headers of thoughts only
    last_end: str = ""  # what may end the last message, before the end of the answer


HARMONY = Channels(  # gpt-oss
    reasoning="<|channel|>analysis<|message|>",
    remark="<|channel|>commentary<|message|>",
    final="<|channel|>final<|message|>",
    following="<|end|><|start|>assistant",
    starts=("<|start|>", "<|channel|>"),
    bodies=("<|message|>",),
    ends=("<|end|>", "<|call|>", "<|return|>"),
    thought="<|channel|>analysis",
)
SOLAR = Channels(  # Solar Open
    reasoning="<|think|>",
    remark="<|content|>",
    final="<|content|>",
    following="<|end|><|begin|>assistant",
    starts=("<|begin|>", "<|think|>", "<|content|>", "<|tool_calls|>"),
    bodies=("<|think|>", "<|content|>"),
    ends=("<|end|>", "<|flush|>", "<|calls|>"),
    thought="<|think|>",
    last_end="<|end|>",
)
