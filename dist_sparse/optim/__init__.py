"""OptimScheduler: optimizer, accumulation, AMP, clipping, learning rate, sparsity in one step."""

from dist_sparse.optim.scheduler import ExponentDecayLr, Noamlr, OptimScheduler

__all__ = ["ExponentDecayLr", "Noamlr", "OptimScheduler"]
