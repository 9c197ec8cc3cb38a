"""The old import path of :mod:`dist_sparse.lightning`."""

from dist_sparse.lightning import PostTrainingDataSparsity, SparsifyCallback, TrainingAwareDataSparsity

__all__ = ["PostTrainingDataSparsity", "SparsifyCallback", "TrainingAwareDataSparsity"]
