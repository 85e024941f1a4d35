"""Drafters that run a model: draft_model and layerskip, and the KV cache and passes that heads use too."""
