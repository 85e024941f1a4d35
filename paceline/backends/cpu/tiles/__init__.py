"""Register tiles: matrix products of rows and packed weights."""
