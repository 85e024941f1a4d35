"""Parts of grammars in llguidance's variant of Lark: literals, JSON, members, and texts up to a mark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NOTHING = '""'  # a rule for the empty text


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON that follows a schema."""
    return "%json " + json.dumps(schema)


def literal(text: str, special: Mapping[str, int]) -> str:
    """A literal in a rule; special tokens in it by id."""
    if not text:
        return ""
    if not special:
        return json.dumps(text)
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def escaped(text: str) -> str:
    """The text escaped for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def text_rule(rule: str, end: str, special: Mapping[str, int]) -> str:
    """The rule for any text with the mark after it, which ends it where it first occurs."""
    if any(token in end for token in special):
        return f"{rule}: /(?s:.+)/? {literal(end, special)}"
    return f"{rule}[lazy]: /(?s:.*){escaped(end)}/"


def members_rule(
    members: Sequence[tuple[str, bool]], separator: str, more: str, add: Callable[[str], str]
) -> str:
    """The rule of these members in their order, and then of any number of `more` ("": none).

    A member is its rule, and whether it may be left out. `add` adds a rule and returns its name.
    """
    first = f"({more} ({separator} {more})*)?" if more else NOTHING
    rest = f"({separator} {more})*" if more else NOTHING  # what follows a member
    for member, may_lack in reversed(members):
        later = add(f"{separator} {member} {rest}" + (f" | {rest}" if may_lack else ""))
        first = add(f"{member} {rest}" + (f" | {first}" if may_lack else ""))
        rest = later
    return first
