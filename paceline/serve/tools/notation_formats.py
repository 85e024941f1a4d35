"""The formats of tool calls whose arguments are no JSON, one entry of NOTATION_FORMATS each."""

from __future__ import annotations

from dataclasses import replace

from paceline.serve.tools.pairs import Pairs
from paceline.serve.tools.pythonic import Pythonic
from paceline.serve.tools.quoted import Quoted
from paceline.serve.tools.tool_format import ToolFormat

_HUNYUAN_TOKENS = tuple(
    f"<{slash}{name}:opensource>"
    for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    for slash in ("", "/")
)
_PYTHONIC = ToolFormat(
    begin="[",
    between=", ",
    end="]",
    marker="",
    tokens=(),
    clues=("[func_name1(param", "ipython"),
    example='[function_name(argument_name="value")]\n\nWrite nothing else then.',
    result="The function's result: {content}",
    call_start="",
    name_end="(",
    call_end=")",
    notation=Pythonic(),
)

NOTATION_FORMATS = {
    "qwen3_coder": ToolFormat(
        begin="<tool_call>\n<function=",
        between="\n<tool_call>\n<function=",
        end="",
        marker="<tool_call>",
        tokens=("<tool_call>", "</tool_call>"),
        clues=("<function=", "<parameter="),
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
        example='<|tool_call>call:function name{argument name:<|"|>text<|"|>}<tool_call|>',
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
        example="<start_function_call>call:function name{argument name:<escape>text<escape>}"
        + "<end_function_call>",
        result="<start_function_response>response{value:<escape>{content}<escape>}<end_function_response>",
        call_start="",
        name_end="{",
        call_end="<end_function_call>",
        notation=Quoted("<escape>"),
    ),
    "lfm2": ToolFormat(
        begin="<|tool_call_start|>[",
        between=", ",
        end="]<|tool_call_end|>",
        marker="<|tool_call_start|>",
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        clues=("List of tools: ", "<|im_start|>"),
        example='<|tool_call_start|>[function_name(argument_name="value")]<|tool_call_end|>',
        result="<|tool_response_start|>{content}<|tool_response_end|>",
        call_start="",
        name_end="(",
        call_end=")",
        notation=Pythonic(),
    ),
    "pythonic": _PYTHONIC,  # Llama 3.2
    "llama4_pythonic": replace(
        _PYTHONIC,
        tokens=("<|python_start|>", "<|python_end|>"),
        clues=(*_PYTHONIC.clues, "<|header_start|>"),
        around=("<|python_start|>", "<|python_end|>"),
    ),
}
