"""Data sparsifiers: what is registered, its masks, and their updates."""

from dist_sparse.records import MaskChange, StepRecord, TableStats
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.importance import ImportanceSparsifier
from dist_sparse.sparsifiers.recorder import Recorder
from dist_sparse.sparsifiers.score import DataNormSparsifier, ScoreSparsifier
from dist_sparse.sparsifiers.stats import describe

__all__ = [
    "BaseDataSparsifier",
    "DataNormSparsifier",
    "ImportanceSparsifier",
    "MaskChange",
    "Recorder",
    "ScoreSparsifier",
    "StepRecord",
    "TableStats",
    "describe",
]
