"""What users asked: prompts read from files of requests, row by row.

A row is one JSON object a line, or one element of a JSON array. These are understood:

    {"messages": [{"role": "user", "content": "..."}, ...]}          a chat
    {"prompt": "..."}                                                a plain text
    {"conversations": [{"from": "human", "value": "..."}, ...]}      ShareGPT
    {"body": {...}} and {"request": {...}}                           logs and batch files of the OpenAI API

A chat is cut after its last user turn: the target answers it anew. Rows that cannot be used are
counted by reason and left out, so that one bad row in a million does not end a run.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import ConfigError, PacelineError, RequestError
from paceline.models.chat import PromptTokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
SHAREGPT_ROLES |= {"chatgpt": "assistant", "bing": "assistant", "system": "system"}
BETWEEN_ROWS = re.compile(r"[\s,]*")
CHUNK = 1 << 20  # bytes read at once from a JSON array
MAX_ROW = 1 << 26  # characters: a row of a JSON array that does not end by then is broken


@dataclass(frozen=True)
class Prompt:
    """What is to be answered: a chat or a plain text."""

    id: str  # of its place in the file: unique there
    segment: str  # the kind of traffic it stands for
    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None  # instead of messages

    def token_ids(self, tokenizer: PromptTokenizer) -> list[int]:
        """The ids that the model gets; a chat goes through the model's template."""
        if self.messages is None:
            return tokenizer.encode(self.text or "")
        return tokenizer.encode(tokenizer.apply_chat_template(self.messages), add_special_tokens=False)


class BadRow(Exception):
    """A row that cannot be used; its text is the reason."""


@dataclass
class Skipped:
    """How many rows were left out, by reason, and where each reason was first met."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> id of a row

    def add(self, reason: str, row: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, row)

    def lines(self) -> list[str]:
        """One line a reason, the most frequent first."""
        return [
            f"{count} rows left out: {reason} (first: {self.first[reason]})"
            for reason, count in self.counts.most_common()
        ]


def read_prompts(path: Path, skipped: Skipped) -> Iterator[Prompt]:
    """The prompts of a file, one at a time; rows without one are counted in `skipped`."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"The prompts {path} cannot be read ({error}): give a file of JSON lines."
        ) from None
    with file:
        for number, row in enumerate(_rows(file), start=1):
            row_id = f"{path.stem}-{number}"
            try:
                yield _prompt(row, row_id, path.stem)
            except BadRow as reason:
                skipped.add(str(reason), row_id)


def tokenized(
    prompts: Iterator[Prompt], tokenizer: PromptTokenizer, max_tokens: int, skipped: Skipped
) -> Iterator[tuple[Prompt, list[int]]]:
    """Each prompt with its token ids; those that are too long or refused by the template are counted."""
    for prompt in prompts:
        try:
            ids = prompt.token_ids(tokenizer)
        except RequestError:  # a template may want turns to alternate, or know no system message
            skipped.add("refused by the chat template", prompt.id)
            continue
        except PacelineError as error:
            raise ConfigError(f"The prompt {prompt.id} cannot be tokenized: {error}") from error
        if not ids:
            skipped.add("empty", prompt.id)
        elif len(ids) > max_tokens:
            skipped.add("too long", prompt.id)
        else:
            yield prompt, ids


def _rows(file: BinaryIO) -> Iterator[Any]:
    """The rows of a file as parsed JSON, or a BadRow in place of one that does not parse."""
    start = file.read(1)
    while start.isspace():
        start = file.read(1)
    if start == b"[":
        yield from _array_rows(file)
        return
    line = start + file.readline()
    while line:
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):  # also bytes that are no UTF-8
                yield BadRow("broken JSON")
        line = file.readline()


def _array_rows(file: BinaryIO) -> Iterator[Any]:
    """The elements of a JSON array whose opening bracket is read, without holding all of them.

    What follows a broken element cannot be found again, so the rest counts as one broken row.
    """
    decoder = json.JSONDecoder()
    text, position = "", 0
    for piece in _decoded(file):
        text, position = text[position:] + piece, 0
        while True:
            position = BETWEEN_ROWS.match(text, position).end()  # type: ignore[union-attr]  # matches always
            if text.startswith("]", position):
                return
            try:
                row, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                break  # it may go on in the next piece
            yield row
        if len(text) - position > MAX_ROW:
            break
    if position < len(text):
        yield BadRow("broken JSON")


def _decoded(file: BinaryIO) -> Iterator[str]:
    """The rest of a file as text, in pieces; bytes that are no UTF-8 become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while piece := file.read(CHUNK):
        yield decoder.decode(piece)


def _prompt(row: Any, row_id: str, default_segment: str) -> Prompt:
    """The prompt that a row means; BadRow if it has none."""
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow("not an object")
    for wrapper in ("body", "request"):
        if isinstance(row.get(wrapper), Mapping):
            row = {**row[wrapper], "segment": row.get("segment", row[wrapper].get("segment"))}
    segment = row.get("segment")
    segment = segment if isinstance(segment, str) and segment else default_segment
    if row.get("messages") is not None:
        return Prompt(row_id, segment, messages=_until_last_user(_messages(row["messages"])))
    if row.get("conversations") is not None:
        return Prompt(row_id, segment, messages=_until_last_user(_sharegpt(row["conversations"])))
    text = row.get("prompt")
    if text is None:
        raise BadRow("neither messages nor prompt nor conversations")
    if not isinstance(text, str):
        raise BadRow("a prompt that is no text")
    if not text.strip():
        raise BadRow("empty")
    return Prompt(row_id, segment, text=text)


def _messages(given: Any) -> list[dict[str, str]]:
    """Role and text of each message."""
    if not isinstance(given, list) or not all(isinstance(message, Mapping) for message in given):
        raise BadRow("messages are no list of objects")
    return [
        {"role": _role(message.get("role")), "content": _text(message.get("content"))} for message in given
    ]


def _sharegpt(given: Any) -> list[dict[str, str]]:
    if not isinstance(given, list) or not all(isinstance(turn, Mapping) for turn in given):
        raise BadRow("messages are no list of objects")
    roles = [turn.get("from") for turn in given]
    if not all(isinstance(role, str) and role in SHAREGPT_ROLES for role in roles):
        raise BadRow("wrong roles")
    return [
        {"role": SHAREGPT_ROLES[role], "content": _text(turn.get("value"))}
        for role, turn in zip(roles, given, strict=True)
    ]


def _role(role: Any) -> str:
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("wrong roles")
    return role


def _text(content: Any) -> str:
    """The text of a message: a string, or the text parts of a list of parts."""
    if isinstance(content, str):
        return content
    if content is None:  # an assistant that only called tools
        return ""
    if not isinstance(content, list):
        raise BadRow("content that is no text")
    parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise BadRow("content that is no text")
    return "".join(part for part in parts if isinstance(part, str))


def _until_last_user(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The chat without what follows its last user turn: the target is to answer there."""
    roles = [message["role"] for message in messages]
    if not messages:
        raise BadRow("empty")
    if "user" not in roles or roles[0] in ("assistant", "tool"):
        raise BadRow("wrong roles")
    last = len(roles) - roles[::-1].index("user")
    if not messages[last - 1]["content"].strip():
        raise BadRow("empty")
    return messages[:last]
