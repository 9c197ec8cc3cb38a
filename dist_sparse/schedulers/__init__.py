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
from dist_sparse.schedulers.torch_ao import CubicSL, LambdaSL

__all__ = [
    "BaseDataScheduler",
    "ConstantDataScheduler",
    "CosineDataScheduler",
    "CubicDataScheduler",
    "CubicSL",
    "CurveDataScheduler",
    "ExponentialDataScheduler",
    "LambdaDataScheduler",
    "LambdaSL",
    "LinearDataScheduler",
    "OneShotDataScheduler",
    "ReadyDataScheduler",
    "Window",
    "curves",
]
