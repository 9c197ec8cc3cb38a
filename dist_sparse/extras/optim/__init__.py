"""OptimScheduler: optimizer, accumulation, AMP, clipping, learning rate, sparsity in one step.

SpeeChain's learning rates have their original names.
"""

from dist_sparse.extras.optim.scheduler import ExponentDecayLr, Noamlr, OptimScheduler

__all__ = ["ExponentDecayLr", "Noamlr", "OptimScheduler"]
