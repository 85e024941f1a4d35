"""Training data: prompts, and the target's answers to them."""
