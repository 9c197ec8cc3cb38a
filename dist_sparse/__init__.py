"""Sparsify the embedding tables of recommendation models while they train on many ranks.

Names are loaded when they are first used: `import dist_sparse` alone needs not even torch, so that `dist-sparse doctor`
runs where torch is missing or broken.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_sparse.report.run_log import RunLog
    from dist_sparse.schedulers.ancestors import CubicSL, LambdaSL
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
    from dist_sparse.shards import ROW
    from dist_sparse.sparsifiers.base import BaseDataSparsifier
    from dist_sparse.sparsifiers.describe import describe
    from dist_sparse.sparsifiers.inspection import TableStats
    from dist_sparse.sparsifiers.norm import DataNormSparsifier
    from dist_sparse.sparsifiers.score import ScoreSparsifier
    from dist_sparse.state.quantize import post_training_sparse_quantize
    from dist_sparse.training.enforce import MaskEnforcer
    from dist_sparse.training.learning_rates import ExponentDecayLr, Noamlr
    from dist_sparse.training.optim_scheduler import OptimScheduler
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
    "ROW": "shards",
    "BaseDataScheduler": "schedulers.base",
    "BaseDataSparsifier": "sparsifiers.base",
    "ConstantDataScheduler": "schedulers.ready",
    "CosineDataScheduler": "schedulers.ready",
    "CubicDataScheduler": "schedulers.ready",
    "CubicSL": "schedulers.ancestors",
    "DataNormSparsifier": "sparsifiers.norm",
    "ExponentDecayLr": "training.learning_rates",
    "ExponentialDataScheduler": "schedulers.ready",
    "LambdaDataScheduler": "schedulers.ready",
    "LambdaSL": "schedulers.ancestors",
    "LinearDataScheduler": "schedulers.ready",
    "MaskEnforcer": "training.enforce",
    "Noamlr": "training.learning_rates",
    "OneShotDataScheduler": "schedulers.ready",
    "OptimScheduler": "training.optim_scheduler",
    "RunLog": "report.run_log",
    "ScoreSparsifier": "sparsifiers.score",
    "SparseTraining": "training.sparsify",
    "TableStats": "sparsifiers.inspection",
    "describe": "sparsifiers.describe",
    "post_training_sparse_quantize": "state.quantize",
    "sparsify": "training.sparsify",
}
"""The module of each name."""

_MODULES = ("groups", "report", "schedulers", "sparsifiers", "state", "training")
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
