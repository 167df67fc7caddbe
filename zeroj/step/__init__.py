"""The train step and its state."""
