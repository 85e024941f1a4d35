"""QKV projections, and attention over paged keys and values."""
