"""Sparsify the embedding tables of recommendation models while they train on many ranks."""

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
