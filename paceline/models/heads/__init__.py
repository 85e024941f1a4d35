"""Learned draft heads: small networks that read the target's hidden states and guess its next tokens."""
