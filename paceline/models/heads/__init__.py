"""Learned draft heads (EAGLE, EAGLE-3, MTP, Medusa): configurations, files and networks."""
