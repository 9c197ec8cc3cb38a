"""Removed weights stay zero while a model trains."""

from dist_sparse.enforcer.enforcer import MaskEnforcer

__all__ = ["MaskEnforcer"]
