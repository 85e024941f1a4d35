"""ToolFormat: how a model writes tool calls, as data.

A call is a name and a JSON object of arguments; formats differ in the text around them:

    begin call_start f name_end {...} call_end between call_start g name_end {...} call_end end

In most, a call is a JSON object itself: {"name": "f", "arguments": {...}}. In some, an id stands before the
name. In some, arguments are no JSON but another notation: see pairs.py, pythonic.py and quoted.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.serve.tools.arguments import Notation
from paceline.serve.tools.channels import Channels

# how a system message describes tools; an example of a call follows
INSTRUCTIONS = """You can call functions to help with the user's request. These are their JSON descriptions:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and its arguments, like this:
"""
EXAMPLE = ("function name", '{"argument name": "value"}')


@dataclass(frozen=True)
class WrittenId:
    """An id that a model writes before a call's name. Clients get another one, which is unique."""

    characters: str  # as in a regular expression's brackets
    length: int  # 0: one or more
    end: str  # the text after it

    @property
    def pattern(self) -> str:
        """The regular expression of an id."""
        return f"[{self.characters}]" + (f"{{{self.length}}}" if self.length else "+")


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing tool calls."""

    begin: str  # before the first call
    between: str  # between two calls
    end: str  # after the last call
    marker: str  # the part of `begin` that occurs only before calls; "": calls can only start the output
    tokens: tuple[str, ...]  # texts that are single tokens in some vocabularies
    clues: tuple[str, ...]  # a chat template that contains all of these uses this format
    result: str  # user message with a call's result if the template lacks tools; {content} becomes the result
    call_start: str = '{"name": "'
    name_end: str = '", "arguments": '  # its first character is in no name; "": that of call_end ends it
    counted: bool = False  # a colon and a number follow the name
    call_end: str = "}"
    id_prefix: str = "call_"
    id_digits: int = 24
    notation: Notation | None = None  # how arguments are written that are no JSON
    single: bool = False  # an answer has one call at most
    channels: Channels | None = None  # an answer is messages with headers; calls are one kind of message
    written_id: WrittenId | None = None  # stands between call_start and the name
    around: tuple[str, str] = ("", "")  # marks that a model may write around all calls, or leave out
    fenced: bool = False  # models may also write a call as a fenced JSON block, see FENCE_START
    example: str = ""  # of a call, for `instructions`; "": as `write` writes EXAMPLE

    @property
    def instructions(self) -> str:
        """The system message if the template lacks tools; {tools} becomes their JSON."""
        return INSTRUCTIONS + (self.example or self.write([EXAMPLE]))

    @property
    def opening(self) -> str:
        """The start of the first call, up to its name, or to the id before that."""
        return self.begin + self.call_start

    def new_id(self, written: str) -> str:
        """A new unique call id; of counted calls it is what is written: their templates repeat it."""
        return self.id_prefix + (written if self.counted else secrets.token_hex(16)[: self.id_digits])

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of calls, each given as name and arguments (JSON)."""
        written = [
            self.call_start
            + self._id_of(number)
            + (f"{name}:{number}" if self.counted else name)
            + self.name_end
            + (self.notation.write(arguments) if self.notation else arguments)
            + self.call_end
            for number, (name, arguments) in enumerate(calls)
        ]
        return self.begin + self.between.join(written) + self.end

    def _id_of(self, number: int) -> str:
        """The id that is written before a call's name, if there is one."""
        found = self.written_id
        return "" if found is None else str(number).zfill(found.length) + found.end


# how Qwen2.5-Coder starts an unconstrained call, whatever its template says
FENCE_START = '```json\n{\n  "name": "'
FENCE_NAME_END = '",\n  "arguments": '
FENCE_END = "\n}\n```"
