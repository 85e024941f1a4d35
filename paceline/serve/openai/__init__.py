"""OpenAI's API: completions, chat completions, responses, models, tokens."""
