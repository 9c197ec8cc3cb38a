"""Measurements against peers in the same run. Nothing here is a test: no figure is asserted."""
