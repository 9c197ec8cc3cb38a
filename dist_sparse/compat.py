"""Schedules of torch.ao and SpeeChain under their original names, for scripts that move from there.

CubicSL, LambdaSL           torch.ao's sparsity schedules
Noamlr, ExponentDecayLr     SpeeChain's learning rates
"""

from dist_sparse.optim.schedules import ExponentDecayLr, Noamlr
from dist_sparse.schedulers.torch_ao import CubicSL, LambdaSL

__all__ = ["CubicSL", "ExponentDecayLr", "LambdaSL", "Noamlr"]
