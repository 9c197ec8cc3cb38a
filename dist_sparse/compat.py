"""SpeeChain's learning rates under their original names, for scripts that move from there."""

from dist_sparse.optim.scheduler import ExponentDecayLr, Noamlr

__all__ = ["ExponentDecayLr", "Noamlr"]
