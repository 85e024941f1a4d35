"""Tool calling: from the tools of a request to a prompt and a grammar, and from the model's text to calls.

    toolbox = Toolbox(tokenizer)                       # once for a model
    plan = toolbox.plan(tools, choice)                 # for each request
    messages, shown = toolbox.conversation(messages, plan)  # what the chat template gets
    SamplingParams(..., **plan.sampling_options())     # the grammar that makes every call valid
    parser = plan.parser()                             # for each of the n outputs
    parser.feed(text), ..., parser.finish()            # events: content, calls, their arguments

Pure code: nothing here knows HTTP.
"""

from paceline.serve.tools.declared import Tool, ToolChoice, check_tools
from paceline.serve.tools.formats import FORMATS, ToolFormat
from paceline.serve.tools.parser import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    ToolCall,
    ToolParser,
    read_whole,
)
from paceline.serve.tools.toolbox import Toolbox, ToolPlan

__all__ = [
    "FORMATS",
    "Arguments",
    "CallEnded",
    "CallStarted",
    "Content",
    "Event",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolFormat",
    "ToolParser",
    "ToolPlan",
    "Toolbox",
    "check_tools",
    "read_whole",
]
