"""Kept requests: rows on disk, and which of them train or judge a head."""
