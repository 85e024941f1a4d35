"""The transformer in torch, for all families: the reference of every backend."""
