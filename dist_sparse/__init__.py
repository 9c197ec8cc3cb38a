"""Sparsify the embedding tables of recommendation models while they train on many ranks.

Names are loaded when they are first used: `import dist_sparse` alone needs not even torch, so that `dist-sparse doctor`
runs where torch is missing or broken.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_sparse.enforcer.enforcer import MaskEnforcer
    from dist_sparse.optim.scheduler import OptimScheduler
    from dist_sparse.optim.schedules import ExponentDecayLr, Noamlr
    from dist_sparse.quantization.quantize import post_training_sparse_quantize
    from dist_sparse.report.run_log import RunLog
    from dist_sparse.schedulers.base import BaseDataScheduler
    from dist_sparse.schedulers.ready import (
        ConstantDataScheduler,
        CosineDataScheduler,
        CubicDataScheduler,
        ExponentialDataScheduler,
        LambdaDataScheduler,
        LinearDataScheduler,
        OneShotDataScheduler,
    )
    from dist_sparse.schedulers.torch_ao import CubicSL, LambdaSL
    from dist_sparse.sparsifiers.base import BaseDataSparsifier
    from dist_sparse.sparsifiers.describe import describe
    from dist_sparse.sparsifiers.inspection import TableStats
    from dist_sparse.sparsifiers.norm import DataNormSparsifier
    from dist_sparse.sparsifiers.score import ScoreSparsifier
    from dist_sparse.tables.shards import ROW
    from dist_sparse.training.sparsify import SparseTraining, sparsify

__all__ = [
    "ROW",
    "BaseDataScheduler",
    "BaseDataSparsifier",
    "ConstantDataScheduler",
    "CosineDataScheduler",
    "CubicDataScheduler",
    "CubicSL",
    "DataNormSparsifier",
    "ExponentDecayLr",
    "ExponentialDataScheduler",
    "LambdaDataScheduler",
    "LambdaSL",
    "LinearDataScheduler",
    "MaskEnforcer",
    "Noamlr",
    "OneShotDataScheduler",
    "OptimScheduler",
    "RunLog",
    "ScoreSparsifier",
    "SparseTraining",
    "TableStats",
    "describe",
    "post_training_sparse_quantize",
    "sparsify",
]

_PLACES = {
    "ROW": "tables.shards",
    "BaseDataScheduler": "schedulers.base",
    "BaseDataSparsifier": "sparsifiers.base",
    "ConstantDataScheduler": "schedulers.ready",
    "CosineDataScheduler": "schedulers.ready",
    "CubicDataScheduler": "schedulers.ready",
    "CubicSL": "schedulers.torch_ao",
    "DataNormSparsifier": "sparsifiers.norm",
    "ExponentDecayLr": "optim.schedules",
    "ExponentialDataScheduler": "schedulers.ready",
    "LambdaDataScheduler": "schedulers.ready",
    "LambdaSL": "schedulers.torch_ao",
    "LinearDataScheduler": "schedulers.ready",
    "MaskEnforcer": "enforcer.enforcer",
    "Noamlr": "optim.schedules",
    "OneShotDataScheduler": "schedulers.ready",
    "OptimScheduler": "optim.scheduler",
    "RunLog": "report.run_log",
    "ScoreSparsifier": "sparsifiers.score",
    "SparseTraining": "training.sparsify",
    "TableStats": "sparsifiers.inspection",
    "describe": "sparsifiers.describe",
    "post_training_sparse_quantize": "quantization.quantize",
    "sparsify": "training.sparsify",
}
"""The module of each name."""

_MODULES = (
    "enforcer",
    "groups",
    "lightning",
    "masking",
    "optim",
    "quantization",
    "report",
    "schedulers",
    "sparsifiers",
    "tables",
    "training",
)
"""Those that are an attribute without an import of their own."""

if not TYPE_CHECKING:  # a type checker would take every name for one that is here

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_MODULES})
