"""Schedulers of a sparsifier's configuration: a base class for your own, and ready ones."""

from dist_sparse.schedulers import curves
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.schedulers.curves import Window
from dist_sparse.schedulers.ready import (
    ConstantDataScheduler,
    CosineDataScheduler,
    CubicDataScheduler,
    CurveDataScheduler,
    ExponentialDataScheduler,
    LambdaDataScheduler,
    LinearDataScheduler,
    OneShotDataScheduler,
    ReadyDataScheduler,
)

__all__ = [
    "BaseDataScheduler",
    "ConstantDataScheduler",
    "CosineDataScheduler",
    "CubicDataScheduler",
    "CurveDataScheduler",
    "ExponentialDataScheduler",
    "LambdaDataScheduler",
    "LinearDataScheduler",
    "OneShotDataScheduler",
    "ReadyDataScheduler",
    "Window",
    "curves",
]
