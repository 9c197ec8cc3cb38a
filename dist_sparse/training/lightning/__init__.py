"""How does a model train under Lightning's Trainer? With one of these callbacks. Importing them needs Lightning."""

from dist_sparse.training.lightning.data_sparsity import PostTrainingDataSparsity, TrainingAwareDataSparsity
from dist_sparse.training.lightning.sparsify_callback import SparsifyCallback

__all__ = ["PostTrainingDataSparsity", "SparsifyCallback", "TrainingAwareDataSparsity"]
