"""The old import path of :mod:`dist_sparse.lightning`."""

from dist_sparse.lightning import SparsifyCallback

__all__ = ["SparsifyCallback"]
