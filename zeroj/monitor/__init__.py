"""Watching a run: scalars to TensorBoard, Weights & Biases and CSV files; times, FLOPs, bytes and collectives."""
