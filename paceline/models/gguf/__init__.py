"""GGUF files: metadata, block formats, tokenizer, and all of it as a Checkpoint."""
