"""Workloads: prompts to measure with, from a JSON Lines file or built in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.traffic.builtin_workloads import BUILT_IN
from paceline.errors import ConfigError, PacelineError
from paceline.options import check_integer, check_number, nearest
from paceline.train.data.prompts import prompt_of, unwrapped
from paceline.train.data.rows import BadRow

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256
# Rows with user turns are those of Spec-Bench (category, turns), whose protocol has answers of this length.
TURNS_MAX_TOKENS = 1024
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Prompt:
    """One request of a workload: a chat or a plain text, and the maximum length of its answer."""

    id: str
    segment: str  # traffic segment
    max_tokens: int
    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None  # instead of messages
    structured_outputs: Mapping[str, Any] | None = None  # from its response_format
    temperature: float = 0.0  # 0 is greedy
    follow_ups: tuple[str, ...] = ()  # user turns that come after the model's answer
    chat_template_kwargs: Mapping[str, Any] | None = None  # variables of the chat template

    def followed_up(self, answer: str) -> Prompt:
        """The prompt of the next turn, after this answer."""
        turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": self.follow_ups[0]}]
        messages = [*(self.messages or ()), *turns]
        return replace(self, id=f"{self.id}+", messages=messages, follow_ups=self.follow_ups[1:])

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """The token ids that the model gets; a chat is rendered by the model's template."""
        if self.messages is None:
            return tokenizer.encode(self.text or "")
        chat = tokenizer.apply_chat_template(self.messages, chat_template_kwargs=self.chat_template_kwargs)
        return tokenizer.encode(chat, add_special_tokens=False)


@dataclass(frozen=True)
class Workload:
    """Named prompts."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def num_requests(self) -> int:
        """The number of its turns."""
        return sum(1 + len(prompt.follow_ups) for prompt in self.prompts)


def load_workload(name: str, limit: int | None = None, max_tokens: int | None = None) -> Workload:
    """The workload of a JSON Lines file, or a built-in one.

    `limit` keeps the first prompts of each segment; `max_tokens` lowers, never raises, the length of answers.
    """
    if limit is not None:
        check_integer(ConfigError, "--limit", limit, 1, None)
    if max_tokens is not None:
        check_integer(ConfigError, "--max-tokens", max_tokens, 2, None)
    if name in BUILT_IN:
        workload = Workload(name, tuple(_prompt(line, name, name) for line in BUILT_IN[name]()))
    elif Path(name).is_file():
        workload = _from_file(Path(name))
    else:
        raise ConfigError(
            f"the workload {name!r} is neither a file nor built in{nearest(name, BUILT_IN) or '.'} Give "
            f"--workload (--data is the same flag) a file of JSON lines, or one of {', '.join(BUILT_IN)}."
        )
    prompts = _limited(workload.prompts, limit)
    if max_tokens is not None:
        prompts = tuple(replace(prompt, max_tokens=min(prompt.max_tokens, max_tokens)) for prompt in prompts)
    return Workload(workload.name, prompts)


def _limited(prompts: tuple[Prompt, ...], limit: int | None) -> tuple[Prompt, ...]:
    """The first `limit` prompts of each segment."""
    if limit is None:
        return prompts
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.segment] += 1
        if seen[prompt.segment] <= limit:
            kept.append(prompt)
    return tuple(kept)


def _from_file(path: Path) -> Workload:
    prompts: list[Prompt] = []
    try:
        # not splitlines(): texts in JSON may hold U+2028 and other characters at which it splits
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the workload {path} cannot be read ({error}): give JSON lines.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line), path.stem, str(number)))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: no JSON ({error}). Write one object a line.") from None
        except PacelineError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ConfigError(f"the workload {path} has no prompts: write one JSON object a line.")
    return Workload(path.stem, tuple(prompts))


def _prompt(line: Any, segment: str, default_id: str) -> Prompt:
    """The prompt of a line. Unknown keys, of other tools, are ignored."""
    if not isinstance(line, Mapping):
        raise ConfigError(f"expected an object, got {line!r:.60}.")
    line = unwrapped(line)
    follow_ups: tuple[str, ...] = ()
    if line.get("messages") is None and line.get("prompt") is None and isinstance(line.get("turns"), list):
        line, follow_ups = _spec_bench(line), tuple(line["turns"][1:])
    messages, text = line.get("messages"), line.get("prompt")
    if messages is None and text is None:  # ShareGPT and other forms of a chat that `paceline train` reads
        with suppress(BadRow):
            messages = prompt_of(line, default_id, segment).messages
    if (messages is None) == (text is None):
        found = ", ".join(map(repr, list(line)[:8])) or "no key"
        raise ConfigError(
            f"give either messages (a chat) or prompt (a text), and not both: this row has {found}."
        )
    if text is not None and (not isinstance(text, str) or not text):
        raise ConfigError(f"prompt must be a text that is not empty, got {text!r:.60}.")
    if messages is not None and not _is_chat(messages):
        raise ConfigError(
            f"messages must be a list of objects with role and content, both texts; got {messages!r:.60}."
        )
    variables = line.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise ConfigError(f"chat_template_kwargs must be an object, got {variables!r:.60}.")
    max_tokens = line.get("max_tokens", DEFAULT_MAX_TOKENS)
    if type(max_tokens) is not int or max_tokens < 2:
        raise ConfigError(f"max_tokens must be an integer of at least 2, got {max_tokens!r}.")
    return Prompt(
        str(line.get("id", default_id)),
        str(line.get("segment", segment)),
        max_tokens,
        messages,
        text,
        _structured_outputs(line.get("response_format")),
        check_number(ConfigError, "temperature", line.get("temperature", 0), 0, 100),
        follow_ups,
        variables,
    )


def _spec_bench(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with user turns, in the keys of a workload. Its segment is the task of Spec-Bench's tables."""
    known: dict[str, Any] = {"max_tokens": TURNS_MAX_TOKENS}
    if line.get("question_id") is not None:
        known["id"] = line["question_id"]
    if isinstance(category := line.get("category"), str):
        known["segment"] = "mt_bench" if category in MT_BENCH else category
    return {**known, **line}


def _structured_outputs(given: Any) -> Mapping[str, Any] | None:
    """structured_outputs for a response_format in OpenAI's format."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    named = given.get("json_schema") if kind == "json_schema" else None
    if not isinstance(named, Mapping) or not isinstance(named.get("schema"), Mapping):
        raise ConfigError(
            "response_format must be {'type': 'json_schema', 'json_schema': {'schema': {...}}} or "
            f"{{'type': 'json_object'}}, got {given!r:.80}."
        )
    return {"json": named["schema"]}


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        )
    )
