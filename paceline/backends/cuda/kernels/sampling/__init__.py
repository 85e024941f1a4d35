"""From logits to tokens: edits, truncation, Gumbel-max, log-probabilities."""
