"""A model's weights in the layout that the tiles read."""
