"""Mask updates that wait for validations, and are undone if they cost quality."""

from dist_sparse.extras.guard.guard import Guard

__all__ = ["Guard"]
