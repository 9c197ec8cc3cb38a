"""Checkpoints that are whole or refused, and load on any number of ranks."""
