"""The OpenAI-compatible HTTP API. Importing this room needs the `serve` extra."""
