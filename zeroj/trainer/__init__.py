"""A Trainer with Hugging Face's names and defaults, over the engine."""
