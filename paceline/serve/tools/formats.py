"""The formats in which models write tool calls, one entry of FORMATS each, and which of them a model has."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.serve.tools.pairs import Pairs
from paceline.serve.tools.pythonic import Pythonic
from paceline.serve.tools.quoted import Quoted
from paceline.serve.tools.tool_format import ToolFormat

_INSTRUCTIONS = """You can call functions to help with the user's request. These are their JSON descriptions:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and its arguments, like this:
"""

_DEEPSEEK_TOKENS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_DEEPSEEK_RESULT = (
    "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
)
_KIMI_TOKENS = tuple(
    f"<|tool_call{end}|>" for end in ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
)
_HUNYUAN_TOKENS = tuple(
    f"<{slash}{name}:opensource>"
    for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    for slash in ("", "/")
)

FORMATS = {
    "hermes": ToolFormat(
        begin="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        end="\n</tool_call>",
        marker="<tool_call>",
        tokens=("<tool_call>", "</tool_call>"),
        clues=("<tool_call>",),
        instructions=_INSTRUCTIONS
        + '<tool_call>\n{"name": "function name", "arguments": {"argument name": "value"}}\n</tool_call>',
        result="<tool_response>\n{content}\n</tool_response>",
        fenced=True,
    ),
    "qwen3_coder": ToolFormat(
        begin="<tool_call>\n<function=",
        between="\n<tool_call>\n<function=",
        end="",
        marker="<tool_call>",
        tokens=("<tool_call>", "</tool_call>"),
        clues=("<function=", "<parameter="),
        instructions=_INSTRUCTIONS
        + "<tool_call>\n<function=function name>\n<parameter=argument name>\nvalue\n</parameter>\n"
        + "</function>\n</tool_call>",
        result="<tool_response>\n{content}\n</tool_response>",
        call_start="",
        name_end=">\n",
        call_end="</function>\n</tool_call>",
        notation=Pairs("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "seed_oss": ToolFormat(
        begin="<seed:tool_call>\n<function=",
        between="\n<seed:tool_call>\n<function=",
        end="",
        marker="<seed:tool_call>",
        tokens=("<seed:tool_call>", "</seed:tool_call>"),
        clues=("<seed:tool_call>", "<function=", "<parameter="),
        instructions=_INSTRUCTIONS
        + "<seed:tool_call>\n<function=function name>\n<parameter=argument name>value</parameter>\n"
        + "</function>\n</seed:tool_call>",
        result="{content}",
        call_start="",
        name_end=">\n",
        call_end="</function>\n</seed:tool_call>",
        notation=Pairs("<parameter=", ">", "</parameter>\n"),
    ),
    "minimax_m2": ToolFormat(
        begin='<minimax:tool_call>\n<invoke name="',
        between='\n<invoke name="',
        end="\n</minimax:tool_call>",
        marker="<minimax:tool_call>",
        tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
        clues=("<minimax:tool_call>", '<invoke name="'),
        instructions=_INSTRUCTIONS
        + '<minimax:tool_call>\n<invoke name="function name">\n'
        + '<parameter name="argument name">value</parameter>\n</invoke>\n</minimax:tool_call>',
        result="<response>{content}</response>",
        call_start="",
        name_end='">\n',
        call_end="</invoke>",
        notation=Pairs('<parameter name="', '">', "</parameter>\n"),
    ),
    "glm45": ToolFormat(
        begin="<tool_call>",
        between="\n<tool_call>",
        end="",
        marker="<tool_call>",
        tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        clues=("<arg_key>", "<arg_value>"),
        instructions=_INSTRUCTIONS
        + "<tool_call>function name\n<arg_key>argument name</arg_key>\n<arg_value>value</arg_value>\n"
        + "</tool_call>",
        result="<tool_response>\n{content}\n</tool_response>",
        call_start="",
        name_end="\n",
        call_end="</tool_call>",
        notation=Pairs("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "glm47": ToolFormat(
        begin="<tool_call>",
        between="<tool_call>",
        end="",
        marker="<tool_call>",
        tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        clues=("<arg_key>", "<arg_value>", "</arg_key><arg_value>"),
        instructions=_INSTRUCTIONS
        + "<tool_call>function name<arg_key>argument name</arg_key><arg_value>value</arg_value></tool_call>",
        result="<tool_response>{content}</tool_response>",
        call_start="",
        name_end="",
        call_end="</tool_call>",
        notation=Pairs("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    ),
    "hy_v3": ToolFormat(
        begin="<tool_calls:opensource>\n<tool_call:opensource>",
        between="\n<tool_call:opensource>",
        end="\n</tool_calls:opensource>",
        marker="<tool_calls:opensource>",
        tokens=_HUNYUAN_TOKENS,
        clues=("<tool_calls{}>", "<tool_sep{}>", ":opensource"),  # its template puts the names together
        instructions=_INSTRUCTIONS
        + "<tool_calls:opensource>\n<tool_call:opensource>function name<tool_sep:opensource>\n"
        + "<arg_key:opensource>argument name</arg_key:opensource>\n"
        + "<arg_value:opensource>value</arg_value:opensource>\n"
        + "</tool_call:opensource>\n</tool_calls:opensource>",
        result="<tool_response:opensource>\n{content}\n</tool_response:opensource>",
        call_start="",
        name_end="<tool_sep:opensource>\n",
        call_end="</tool_call:opensource>",
        notation=Pairs(
            "<arg_key:opensource>",
            "</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>\n",
        ),
    ),
    "gemma4": ToolFormat(
        begin="<|tool_call>call:",
        between="<|tool_call>call:",
        end="",
        marker="<|tool_call>",
        tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
        clues=("<|tool_call>", '<|"|>'),
        instructions=_INSTRUCTIONS
        + '<|tool_call>call:function name{argument name:<|"|>text<|"|>}<tool_call|>',
        result='<|tool_response>response{value:<|"|>{content}<|"|>}<tool_response|>',
        call_start="",
        name_end="{",
        call_end="<tool_call|>",
        notation=Quoted('<|"|>'),
    ),
    "functiongemma": ToolFormat(
        begin="<start_function_call>call:",
        between="<start_function_call>call:",
        end="",
        marker="<start_function_call>",
        tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
        clues=("<start_function_call>", "<escape>"),
        instructions=_INSTRUCTIONS
        + "<start_function_call>call:function name{argument name:<escape>text<escape>}<end_function_call>",
        result="<start_function_response>response{value:<escape>{content}<escape>}<end_function_response>",
        call_start="",
        name_end="{",
        call_end="<end_function_call>",
        notation=Quoted("<escape>"),
    ),
    "mistral": ToolFormat(
        begin="[TOOL_CALLS] [",
        between=", ",
        end="]",
        marker="[TOOL_CALLS]",
        tokens=("[TOOL_CALLS]",),
        clues=("[TOOL_CALLS]",),
        instructions=_INSTRUCTIONS
        + '[TOOL_CALLS] [{"name": "function name", "arguments": {"argument name": "value"}}]',
        result="[TOOL_RESULTS] {content}[/TOOL_RESULTS]",
        id_prefix="",
        id_digits=9,  # the only length that its template accepts
    ),
    "mistral_args": ToolFormat(  # Ministral 3, Devstral Small 2
        begin="[TOOL_CALLS]",
        between="[TOOL_CALLS]",
        end="",
        marker="[TOOL_CALLS]",
        tokens=("[TOOL_CALLS]", "[ARGS]"),
        clues=("[TOOL_CALLS]", "[ARGS]"),
        instructions=_INSTRUCTIONS + '[TOOL_CALLS]function name[ARGS]{"argument name": "value"}',
        result="[TOOL_RESULTS]{content}[/TOOL_RESULTS]",
        call_start="",
        name_end="[ARGS]",
        call_end="",
        id_prefix="",
        id_digits=9,
    ),
    "nemotron_json": ToolFormat(  # Nemotron Nano 2
        begin="<TOOLCALL>[",
        between=", ",
        end="]</TOOLCALL>",
        marker="<TOOLCALL>",
        tokens=("<TOOLCALL>", "</TOOLCALL>"),
        clues=("<TOOLCALL>",),
        instructions=_INSTRUCTIONS
        + '<TOOLCALL>[{"name": "function name", "arguments": {"argument name": "value"}}]</TOOLCALL>',
        result="<TOOL_RESPONSE>[{content}]</TOOL_RESPONSE>",
    ),
    "granite": ToolFormat(  # Granite 3
        begin="<|tool_call|>[",
        between=", ",
        end="]",
        marker="<|tool_call|>",
        tokens=("<|tool_call|>",),
        clues=("<|tool_call|>",),
        instructions=_INSTRUCTIONS
        + '<|tool_call|>[{"name": "function name", "arguments": {"argument name": "value"}}]',
        result="{content}",
    ),
    "lfm2": ToolFormat(
        begin="<|tool_call_start|>[",
        between=", ",
        end="]<|tool_call_end|>",
        marker="<|tool_call_start|>",
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        clues=("List of tools: ", "<|im_start|>"),
        instructions=_INSTRUCTIONS
        + '<|tool_call_start|>[function_name(argument_name="value")]<|tool_call_end|>',
        result="<|tool_response_start|>{content}<|tool_response_end|>",
        call_start="",
        name_end="(",
        call_end=")",
        notation=Pythonic(),
    ),
    "deepseek_v3": ToolFormat(
        begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        between="\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        end="<｜tool▁calls▁end｜>",
        marker="<｜tool▁calls▁begin｜>",
        tokens=_DEEPSEEK_TOKENS,
        clues=("<｜tool▁sep｜>", "```json"),
        instructions=_INSTRUCTIONS
        + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>function name\n```json\n"
        + '{"argument name": "value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        result=_DEEPSEEK_RESULT,
        call_start="",
        name_end="\n```json\n",
        call_end="\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": ToolFormat(
        begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        between="<｜tool▁call▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        marker="<｜tool▁calls▁begin｜>",
        tokens=_DEEPSEEK_TOKENS,
        clues=("<｜tool▁sep｜>",),
        instructions=_INSTRUCTIONS
        + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function name<｜tool▁sep｜>"
        + '{"argument name": "value"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        result=_DEEPSEEK_RESULT,
        call_start="",
        name_end="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
    ),
    "kimi_k2": ToolFormat(
        begin="<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        between="<|tool_call_begin|>functions.",
        end="<|tool_calls_section_end|>",
        marker="<|tool_calls_section_begin|>",
        tokens=_KIMI_TOKENS,
        clues=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
        instructions=_INSTRUCTIONS
        + "<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>"
        + '{"argument name": "value"}<|tool_call_end|><|tool_calls_section_end|>',
        result="{content}",
        call_start="",
        name_end="<|tool_call_argument_begin|>",
        counted=True,  # from the first call of the conversation on
        call_end="<|tool_call_end|>",
        id_prefix="functions.",
    ),
    "openai": ToolFormat(  # gpt-oss' harmony
        begin="<|channel|>commentary to=functions.",
        between="<|call|><|start|>assistant<|channel|>commentary to=functions.",
        end="<|call|>",
        marker="<|channel|>commentary to=",
        tokens=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
        clues=("<|channel|>", "<|message|>"),
        instructions=_INSTRUCTIONS
        + "<|channel|>commentary to=functions.name <|constrain|>json<|message|>"
        + '{"argument name": "value"}<|call|>',
        result="The function's result: {content}",
        call_start="",
        name_end=" <|constrain|>json<|message|>",
        call_end="",
        channels=True,
    ),
    "llama3_json": ToolFormat(
        begin="",
        between="; ",
        end="",
        marker="",
        name_end='", "parameters": ',
        tokens=(),
        clues=("ipython", '"parameters": '),  # the role of results; Llama 3.2 names no <|python_tag|>
        instructions=_INSTRUCTIONS
        + '{"name": "function name", "parameters": {"argument name": "value"}}\n\nWrite nothing else then.',
        result="The function's result: {content}",
    ),
}
DEFAULT_FORMAT = "hermes"


def named_format(name: str) -> ToolFormat:
    """The format with this name."""
    if name not in FORMATS:
        raise ConfigError(f"tool_call_parser must be one of {', '.join(FORMATS)}, got {name!r}.")
    return FORMATS[name]


def choose_format(template: str | None, name: str | None = None) -> ToolFormat:
    """The format named `name`; else the one that the chat template uses; else the default."""
    if name is not None:
        return named_format(name)
    known = [
        entry for entry in FORMATS.values() if template and all(clue in template for clue in entry.clues)
    ]
    # some formats have the marks of another one and more
    return max(known, key=lambda entry: len(entry.clues), default=FORMATS[DEFAULT_FORMAT])
