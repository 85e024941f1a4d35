"""Drafters that copy earlier text: ngram and suffix."""
