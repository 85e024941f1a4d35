"""Tool calling: from a request's tools to prompt and grammar, and from the model's text to tool calls.

    toolbox = Toolbox(tokenizer)                       # once per model
    plan = toolbox.plan(tools, choice)                 # per request
    messages, shown = toolbox.conversation(messages, plan)  # input of the chat template
    SamplingParams(..., **plan.sampling_options())     # the grammar that makes every call valid
    plan = toolbox.reading(plan, prompt, params)       # how the answer to this prompt is read
    parser = plan.parser()                             # per output
    parser.feed(text), ..., parser.finish()            # events: reasoning, content, calls, arguments
    engine.submit(..., watch=plan.watch)               # an identical repeat of a call ends the output

Independent of HTTP.
"""

from paceline.serve.tools.declared import Tool, ToolChoice, check_tools
from paceline.serve.tools.events import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    OutputParser,
    Reasoning,
    ToolCall,
    read_output,
    read_whole,
)
from paceline.serve.tools.formats import FORMATS, ToolFormat
from paceline.serve.tools.parser import ToolParser
from paceline.serve.tools.reasoning import ReasoningFormat, ReasoningParser, choose_reasoning
from paceline.serve.tools.repeats import DistinctCalls
from paceline.serve.tools.toolbox import Toolbox, ToolPlan

__all__ = [
    "FORMATS",
    "Arguments",
    "CallEnded",
    "CallStarted",
    "Content",
    "DistinctCalls",
    "Event",
    "OutputParser",
    "Reasoning",
    "ReasoningFormat",
    "ReasoningParser",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolFormat",
    "ToolParser",
    "ToolPlan",
    "Toolbox",
    "check_tools",
    "choose_reasoning",
    "read_output",
    "read_whole",
]
