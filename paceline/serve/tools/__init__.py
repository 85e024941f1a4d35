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
