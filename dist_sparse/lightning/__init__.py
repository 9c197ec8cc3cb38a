"""Callbacks for Lightning's Trainer. Importing them needs Lightning."""

from dist_sparse.lightning.callback import SparsifyCallback
from dist_sparse.lightning.torch_ao import PostTrainingDataSparsity, TrainingAwareDataSparsity

__all__ = ["PostTrainingDataSparsity", "SparsifyCallback", "TrainingAwareDataSparsity"]
