"""Register tiles: products of rows and packed weights."""
