"""Prompts from request logs and data sets, row by row.

A row is one line of JSON Lines or one element of a JSON array, in one of these forms:

    {"messages": [{"role": "user", "content": "..."}, ...]}          a chat
    {"prompt": "..."}                                                a plain text
    {"conversations": [{"from": "human", "value": "..."}, ...]}      ShareGPT
    {"input": "..."} or {"input": [{"role": ..., ...}, ...]}         a request for OpenAI's responses
    {"turns": ["...", ...]}                                          Spec-Bench, MT-bench: user turns
    {"body": {...}} and {"request": {...}}                           logs and batch files of the OpenAI API

A chat is cut after its last user turn, and one of user turns alone after the first; the target answers it
anew. Unusable rows are counted by reason and skipped, so that one bad row in a million does not end a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, PacelineError, RequestError
from paceline.train.data.rows import BadRow, read_rows
from paceline.words import counted

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
SHAREGPT_ROLES |= {"chatgpt": "assistant", "bing": "assistant", "system": "system"}
MAX_SEGMENT = 64  # characters of a segment name, which appears in tables
LONGEST_TOKEN = 256  # characters; texts longer than the token limit times this are not even tokenized


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer: a chat or a plain text."""

    id: str  # its position in the file: unique there
    segment: str  # traffic segment
    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None  # instead of messages

    @property
    def characters(self) -> int:
        """Length in characters, plus one per message."""
        contents = [str(message["content"]) for message in self.messages or ()]
        return len(self.text or "") + sum(len(content) + 1 for content in contents)

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """The token ids that the model gets; a chat is rendered by the model's template."""
        if self.messages is None:
            return tokenizer.encode(self.text or "")
        return tokenizer.encode(tokenizer.apply_chat_template(self.messages), add_special_tokens=False)


@dataclass
class Skipped:
    """Number of skipped rows by reason, and the first row of each."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> id of a row

    def add(self, reason: str, row: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, row)

    def lines(self) -> list[str]:
        """One line per reason, the most frequent first."""
        return [
            f"{counted(count, 'rows')} left out: {reason} (first: {self.first[reason]})"
            for reason, count in self.counts.most_common()
        ]


def read_all_prompts(paths: Sequence[Path], skipped: Skipped) -> Iterator[Prompt]:
    """The prompts of several files. Files of the same name get different prefixes in the ids."""
    names: Counter[str] = Counter()
    for path in paths:
        names[path.stem] += 1
        times = names[path.stem]
        yield from read_prompts(path, skipped, path.stem if times == 1 else f"{path.stem}({times})")


def read_prompts(path: Path, skipped: Skipped, name: str | None = None) -> Iterator[Prompt]:
    """The prompts of a file, one at a time; unusable rows are counted in `skipped`.

    Ids begin with `name`, or with the file's name.
    """
    for number, row in enumerate(read_rows(path), start=1):
        row_id = f"{name or path.stem}-{number}"
        try:
            yield prompt_of(row, row_id, path.stem)
        except BadRow as reason:
            skipped.add(str(reason), row_id)


def tokenized(
    prompts: Iterator[Prompt],
    tokenizer: Tokenizer,
    max_tokens: int,
    skipped: Skipped,
    excluded: Container[Prompt] = (),
) -> Iterator[tuple[Prompt, list[int]]]:
    """Each prompt with its token ids; those that cannot or must not be used are counted in `skipped`."""
    seen: set[int] = set()
    for prompt in prompts:
        if prompt in excluded:
            skipped.add("in a file of --exclude", prompt.id)
            continue
        if prompt.characters > LONGEST_TOKEN * max_tokens:
            skipped.add("too long", prompt.id)
            continue
        try:
            ids = prompt.token_ids(tokenizer)
        except RequestError:  # templates may require alternating turns, or have no system message
            skipped.add("refused by the chat template", prompt.id)
            continue
        except PacelineError as error:
            raise ConfigError(f"The prompt {prompt.id} cannot be tokenized: {error}") from error
        if not ids:
            skipped.add("empty", prompt.id)
        elif len(ids) > max_tokens:
            skipped.add("too long", prompt.id)
        elif (key := hash(tuple(ids))) in seen:  # or one could be held out and the other trained on
            skipped.add("the same as an earlier prompt", prompt.id)
        else:
            seen.add(key)
            yield prompt, ids


def prompt_of(row: Any, row_id: str, default_segment: str) -> Prompt:
    """The prompt of a row; BadRow if it has none."""
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow("not an object")
    row = unwrapped(row)
    segment = row.get("segment")
    named = " ".join(_unicode(segment).split()) if isinstance(segment, str) else ""
    segment = named[:MAX_SEGMENT] or default_segment
    for key, read in CHATS.items():
        if row.get(key) is not None:
            return Prompt(row_id, segment, messages=_until_last_user(read(row[key])))
    text = row.get("prompt")
    if text is None:
        raise BadRow(f"none of prompt, {', '.join(CHATS)}")
    if not isinstance(text, str):
        raise BadRow("a prompt that is no text")
    if not text.strip():
        raise BadRow("empty")
    return Prompt(row_id, segment, text=_unicode(text))


def unwrapped(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request of a log's or batch file's row; its id and segment are those of the row, if it has them."""
    outer = {key: row[key] for key in ("id", "segment") if row.get(key) is not None}
    for key in ("body", "request"):
        if isinstance(row.get(key), Mapping):
            return {**unwrapped(row[key]), **outer}
    return row


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


def _input(given: Any) -> list[dict[str, str]]:
    """The messages of a /v1/responses request; a text is a user message."""
    return _messages([{"role": "user", "content": given}] if isinstance(given, str) else given)


def _first_turn(given: Any) -> list[dict[str, str]]:
    """The first of a list of user turns: those after it need the model's answers."""
    if not isinstance(given, list) or not all(isinstance(turn, str) for turn in given):
        raise BadRow("turns are no list of texts")
    return _messages([{"role": "user", "content": turn} for turn in given[:1]])


CHATS: Mapping[str, Callable[[Any], list[dict[str, str]]]] = {
    "messages": _messages,
    "conversations": _sharegpt,
    "input": _input,
    "turns": _first_turn,
}


def _role(role: Any) -> str:
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("wrong roles")
    return role


def _text(content: Any) -> str:
    """The text of a message: a string, or the text parts of a list."""
    if isinstance(content, str):
        return _unicode(content)
    if content is None:  # an assistant message with only tool calls
        return ""
    if not isinstance(content, list):
        raise BadRow("content that is no text")
    parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise BadRow("content that is no text")
    return _unicode("".join(part for part in parts if isinstance(part, str)))


def _unicode(text: str) -> str:
    """The text, if it is valid Unicode: JSON can spell lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("characters that are none: bytes that are no UTF-8, or half a surrogate pair") from None
    return text


def _until_last_user(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The chat up to its last user turn, which the target answers."""
    roles = [message["role"] for message in messages]
    if not messages:
        raise BadRow("empty")
    if "user" not in roles or roles[0] in ("assistant", "tool"):
        raise BadRow("wrong roles")
    last = len(roles) - roles[::-1].index("user")
    if not messages[last - 1]["content"].strip():
        raise BadRow("empty")
    return messages[:last]
