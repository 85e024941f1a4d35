"""What each kind of head learns: its forward pass in training, and its loss."""
