"""Compiling for a cluster that is not here, and reading the program."""
