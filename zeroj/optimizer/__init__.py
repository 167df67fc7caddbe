"""Optax transformations over sharded state."""
