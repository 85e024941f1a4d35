"""The OpenAI-compatible HTTP server. Importing this package needs the `serve` extra."""
