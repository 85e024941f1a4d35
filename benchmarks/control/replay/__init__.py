"""Replays the controller's choices on recorded answers, with the times of an H200's passes."""
