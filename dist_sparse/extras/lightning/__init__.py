"""Lightning callback that prunes the training model."""

from dist_sparse.extras.lightning.callback import SparsifyCallback

__all__ = ["SparsifyCallback"]
