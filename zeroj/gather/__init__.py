"""Gathering parameters where the traced program uses them."""
