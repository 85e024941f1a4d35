"""Mixtures of experts: router, routing, grouped products."""
