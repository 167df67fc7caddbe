"""Saving, restoring, exporting."""
