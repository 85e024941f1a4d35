"""Model families: how each differs from llama, and how its config.json is read."""
