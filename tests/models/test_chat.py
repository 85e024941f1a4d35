"""Chat templates: sandboxed, and clear about messages they cannot take."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import CheckpointError, RequestError
from paceline.models.chat import ChatTemplate

USER = {"role": "user", "content": "hi"}


def render(source: str, messages: Any = (USER,), **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_a_template_sees_what_transformers_shows_it() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ tools }}") == "<s>hiNone"
    assert render("{% if add_generation_prompt %}go{% endif %}") == "go"
    assert render("{{ tools | tojson }}", tools=[{"é": "<&>"}]) == '[{"é": "<&>"}]'
    assert render("{{ messages[0] | tojson(indent=1) }}") == '{\n "role": "user",\n "content": "hi"\n}'
    assert render("{% for m in [1, 2] %}{% break %}{% endfor %}{% generation %}x{% endgeneration %}") == "x"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    sums = "{% for i in [1, 2] %}{% set total.n = total.n + i %}{% endfor %}{{ total.n }}"
    assert render("{% set total = namespace(n=1) %}" + sums) == "4"
    assert render("{{ dict(a=1) }}") == "{'a': 1}"
    assert render("  {% if true %}\nx{% endif %}\n") == "x"  # blocks leave no white space


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_the_last_message_can_be_continued() -> None:
    begun = [USER, {"role": "assistant", "content": " so [end] "}]
    assert render(CHATML, begun, continue_final_message=True) == "[user]hi[end][assistant]so [end] "
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(CHATML, [{"role": "user", "content": parts}], continue_final_message=True) == "[user]a\nb"


@pytest.mark.parametrize(
    ("source", "last", "message"),
    [
        (CHATML, {"role": "assistant", "content": ""}, "needs a last message with a text"),
        ("{{ messages[0].content }}", {"role": "assistant", "content": "x"}, "leaves out the text"),
    ],
)
def test_what_cannot_be_continued_is_reported(source: str, last: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(source, [USER, last], continue_final_message=True)


def test_a_template_has_variables_of_its_own() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}{{ raise_exception }}{{ mode }}", {"bos_token": ""}
    )
    assert template.variables == {"mode"}
    source = "{% if mode is defined %}{{ mode }}{% else %}none{% endif %}{{ namespace is defined }}"
    assert render(source) == "noneTrue"
    assert render(source, chat_template_kwargs={"mode": "x", "namespace": 1, "other": 2}) == "xTrue"
    with pytest.raises(RequestError, match="may not set 'messages': it is a field of its own"):
        render(source, chat_template_kwargs={"messages": []})


def test_a_call_of_a_tool_needs_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert render("{{ messages[0].tool_calls[0].function.name }}", [message]) == "f"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        (["hi"], "Message 0 is str"),
        ([USER, {"role": "wizard", "content": "x"}], "Message 1 has role 'wizard'; expected one of system"),
        ([{"content": "x"}], "role 'None'"),
        ([{"role": ["user"], "content": "x"}], "role"),
        ([{"role": "user"}], "needs a content"),
        ([{"role": "user", "content": 5}], "needs a content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts"),
    ],
)
def test_bad_messages_are_reported(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render("x", messages)


def test_what_a_template_refuses_is_reported() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="refuses these messages"):
        render("{{ messages[0].content + 1 }}")
    with pytest.raises(RequestError, match="tool"):
        render("x", tools=[5])
    with pytest.raises(RequestError, match="no place for tools"):
        render("x", tools=[{"type": "function"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 'x' %}",
        "{{ namespace(__class__='x') }}",
        "{{ dict.fromkeys([1]) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match="refuses"):
        render(source)


def test_a_template_that_is_not_jinja_is_reported() -> None:
    with pytest.raises(CheckpointError, match="not valid Jinja"):
        render("{% if %}")


def test_the_developer_role_becomes_system_where_the_template_lacks_it() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", message) == "system"
    assert render("{{ 'developer' == messages[0].role }}", message) == "True"
