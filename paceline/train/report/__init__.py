"""What a training run shows and leaves behind: progress, plot, model card."""
