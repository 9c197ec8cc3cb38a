"""OptimScheduler: optimizer, accumulation, AMP, clipping, learning rate, sparsity in one step."""

from dist_sparse.optim.scheduler import OptimScheduler
from dist_sparse.optim.schedules import ExponentDecayLr, Noamlr

__all__ = ["ExponentDecayLr", "Noamlr", "OptimScheduler"]
