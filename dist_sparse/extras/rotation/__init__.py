"""Rotations that gather the information of a table in few columns, and leave a model's output
unchanged."""

from dist_sparse.extras.rotation.update import Rotation, rotate

__all__ = ["Rotation", "rotate"]
