"""The training loop: batches, the target's states, acceptance, checkpoints."""
