"""Chat templates: from messages to a prompt, by the model's own Jinja template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, TypedDict

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from paceline.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    pass

# files of a folder that have templates, the first before the others; and one for conversations with tools
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = Mapping[str, object]

# ends the last message while it is rendered, to find where the template puts the end of its text
_CONTINUED = "CONTINUED_FINAL_MESSAGE"

# names of what the assistant thought; templates read the first, those of gpt-oss the second
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# a message by which a template shows whether it reads lists of text parts
_PROBE_TEXTS = ("first part", "second part")
_PROBE_MESSAGE = {"role": "user", "content": [{"type": "text", "text": text} for text in _PROBE_TEXTS]}

# variables of templates that have fields of their own
_OWN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


class TemplateOptions(TypedDict, total=False):
    """How messages become a prompt. The names are those of transformers and vLLM."""

    add_generation_prompt: bool  # the prompt ends where a new message of the assistant starts; default: True
    continue_final_message: bool  # the prompt ends within the last message, which the answer continues
    chat_template_kwargs: Mapping[str, object] | None  # more variables for the template


class ChatTemplate:
    """A model's chat template. `special_tokens` are its variables, such as {"bos_token": "<s>"}."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for these messages.

        It ends where a new message of the assistant starts (`add_generation_prompt`), or where the text of
        the last message ends (`continue_final_message`). `chat_template_kwargs` are variables such as
        Qwen3's `enable_thinking`; names that are not among `variables` change nothing.
        """
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError("Each tool must be an object with its JSON schema.")
        if tools and "tools" not in self.source:
            raise RequestError(
                "The model's chat template has no place for tools. Describe them in a system message; the "
                "server does so itself."
            )
        checked = [_checked_message(number, message) for number, message in enumerate(messages)]
        if not checked:
            raise RequestError("A chat needs at least one message.")
        if any(isinstance(message.get("content"), list) for message in checked) and not self._reads_parts:
            checked = [_with_joined_parts(message) for message in checked]
        if "developer" not in self.source:  # OpenAI's newer word for system, which few templates know
            checked = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in checked
            ]
        if continue_final_message:
            checked[-1] = _continued(checked[-1])
        rendered = self._rendered(
            messages=checked,
            tools=list(tools) if tools is not None else None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            variables=self._checked_variables(chat_template_kwargs or {}),
        )
        if not continue_final_message:
            return rendered
        text, mark, _ = rendered.rpartition(_CONTINUED)
        if not mark:
            raise RequestError(
                "continue_final_message: the model's chat template leaves out the text of the last message. "
                "Continue a message of the assistant or of the user."
            )
        return text

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and that chat_template_kwargs may set."""
        _ = self._compiled  # CheckpointError if the template is not valid
        names = jinja2.meta.find_undeclared_variables(self._environment.parse(self.source))
        return frozenset(
            names - set(self._environment.globals) - _OWN_VARIABLES - self._special_tokens.keys()
        )

    def _checked_variables(self, given: Mapping[str, object]) -> dict[str, object]:
        """Those of the given variables that the template reads. RequestError if one is not the client's."""
        for name in given:
            if name in _OWN_VARIABLES:
                raise RequestError(
                    f"chat_template_kwargs may not set {name!r}: it is a field of its own. Set that instead."
                )
        return {name: value for name, value in given.items() if name in self.variables}

    def _rendered(self, variables: Mapping[str, object], **own: object) -> str:
        template = self._compiled
        try:
            return template.render({**variables, **self._special_tokens, **own, "documents": None})
        # a template is a program of the model's author and may raise anything: report it as it is
        except Exception as error:
            raise RequestError(f"The model's chat template refuses these messages: {error}.") from error

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template reads contents that are lists of text parts, rather than prints the lists."""
        own = {"messages": [_PROBE_MESSAGE], "tools": None, "add_generation_prompt": True}
        try:
            rendered = self._rendered({}, **own)
        except RequestError:
            return False
        return all(text in rendered for text in _PROBE_TEXTS) and "'type'" not in rendered

    @cached_property
    def _environment(self) -> jinja2.Environment:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["namespace"] = _SafeNamespace
        environment.globals["dict"] = _make_dict
        return environment

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return self._environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(
                f"The model's chat template is not valid Jinja: {error}. Fetch the model again, "
                f"or give a plain prompt instead of messages."
            ) from error


def _checked_message(number: int, message: Message) -> dict[str, object]:
    """The message as a plain dict, its reasoning by every name; RequestError if it is not valid."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"Message {number} is {type(message).__name__}, not an object with role and content."
        )
    if message.get("role") not in ROLES:
        raise RequestError(
            f"Message {number} has role {str(message.get('role'))[:80]!r}; "
            f"expected one of {', '.join(ROLES)}."
        )
    content = message.get("content")
    if isinstance(content, list):
        _check_parts(number, content)
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(f"Message {number} needs a content that is a text or a list of text parts.")
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _check_parts(number: int, parts: list[object]) -> None:
    for part in parts:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise RequestError(
                f"Message {number} has a part that is not text; only text parts are supported."
            )


def _with_joined_parts(message: dict[str, object]) -> dict[str, object]:
    """The message with one text: for templates that read no parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _continued(message: dict[str, object]) -> dict[str, object]:
    """The message with the mark behind its text."""
    content = message.get("content")
    if not content:
        raise RequestError(
            "continue_final_message needs a last message with a text to continue. Give it one, or leave "
            "continue_final_message out."
        )
    if isinstance(content, list):
        *others, last = content
        return {**message, "content": [*others, {**last, "text": f"{last['text']}{_CONTINUED}"}]}
    return {**message, "content": f"{content}{_CONTINUED}"}


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training; we render its content only."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(jinja2.utils.Namespace):
    """A namespace without names like __class__, by which a template could pose as another type."""

    def __init__(self, **values: object) -> None:
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not have the name {name!r}")
        super().__setitem__(name, value)


def _make_dict(**values: object) -> dict[str, object]:
    """`dict` for templates: a function, so that they cannot reach the type itself."""
    return values


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape HTML characters, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
