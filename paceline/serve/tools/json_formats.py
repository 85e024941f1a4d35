"""The formats of tool calls whose arguments are JSON, one entry of JSON_FORMATS each."""

from __future__ import annotations

from paceline.serve.tools.channels import HARMONY, SOLAR
from paceline.serve.tools.tool_format import ToolFormat, WrittenId

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
_SOLAR_TOKENS = (
    *("<|begin|>", "<|think|>", "<|content|>", "<|end|>", "<|tool_calls|>", "<|calls|>"),
    *(f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end")),
)

JSON_FORMATS = {
    "hermes": ToolFormat(
        begin="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        end="\n</tool_call>",
        marker="<tool_call>",
        tokens=("<tool_call>", "</tool_call>"),
        clues=("<tool_call>",),
        result="<tool_response>\n{content}\n</tool_response>",
        fenced=True,
    ),
    "mistral": ToolFormat(
        begin="[TOOL_CALLS] [",
        between=", ",
        end="]",
        marker="[TOOL_CALLS]",
        tokens=("[TOOL_CALLS]",),
        clues=("[TOOL_CALLS]",),
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
        result="<TOOL_RESPONSE>[{content}]</TOOL_RESPONSE>",
    ),
    "hunyuan_a13b": ToolFormat(
        begin="<tool_calls>[",
        between=", ",
        end="]</tool_calls>",
        marker="<tool_calls>",
        tokens=("<tool_calls>", "</tool_calls>"),
        clues=('<tool_calls>[{"name": "',),
        result="<tool_response>{content}</tool_response>",
    ),
    "cohere_command3": ToolFormat(  # Command R7B and later
        begin="<|START_ACTION|>[\n    ",
        between=",\n    ",
        end="\n]<|END_ACTION|>",
        marker="<|START_ACTION|>",
        tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
        clues=("<|START_ACTION|>", '"tool_name": "'),
        result='<|START_TOOL_RESULT|>[\n    {"results": {"0": "{content}"}}\n]<|END_TOOL_RESULT|>',
        call_start='{"tool_call_id": "',
        written_id=WrittenId("0-9", 0, '", "tool_name": "'),  # models count the calls of the conversation
        name_end='", "parameters": ',
    ),
    "solar_open": ToolFormat(
        begin="<|tool_calls|>",
        between="",
        end="<|calls|>",
        marker="<|tool_calls|>",
        tokens=_SOLAR_TOKENS,
        clues=("<|tool_call:begin|>", "<|tool_call:args|>"),
        example="<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>function name<|tool_call:args|>"
        + '{"argument name": "value"}<|tool_call:end|><|calls|>',
        result="{content}",
        call_start="<|tool_call:begin|>",
        written_id=WrittenId("a-z0-9", 10, "<|tool_call:name|>"),
        name_end="<|tool_call:args|>",
        call_end="<|tool_call:end|>",
        id_prefix="",
        id_digits=10,  # what its template asks for
        channels=SOLAR,
    ),
    "granite": ToolFormat(  # Granite 3
        begin="<|tool_call|>[",
        between=", ",
        end="]",
        marker="<|tool_call|>",
        tokens=("<|tool_call|>",),
        clues=("<|tool_call|>",),
        result="{content}",
    ),
    "deepseek_v3": ToolFormat(
        begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        between="\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        end="<｜tool▁calls▁end｜>",
        marker="<｜tool▁calls▁begin｜>",
        tokens=_DEEPSEEK_TOKENS,
        clues=("<｜tool▁sep｜>", "```json"),
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
        example="<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>"
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
        example="<|channel|>commentary to=functions.name <|constrain|>json<|message|>"
        + '{"argument name": "value"}<|call|>',
        result="The function's result: {content}",
        call_start="",
        name_end=" <|constrain|>json<|message|>",
        call_end="",
        channels=HARMONY,
    ),
    "llama3_json": ToolFormat(
        begin="",
        between="; ",
        end="",
        marker="",
        name_end='", "parameters": ',
        tokens=(),
        clues=("ipython", '"parameters": '),  # the role of results; Llama 3.2 names no <|python_tag|>
        example='{"name": "function name", "parameters": {"argument name": "value"}}'
        + "\n\nWrite nothing else then.",
        result="The function's result: {content}",
    ),
}
