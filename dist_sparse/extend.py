"""Base classes for your own masks, scores and schedules.

ScoreSparsifier      your own score: ``score``
BaseDataSparsifier   your own masks: ``update_mask``, as in torch.ao
BaseDataScheduler    your own schedule: ``get_schedule_param``, as in torch.ao
"""

from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.score import ScoreSparsifier

__all__ = ["BaseDataScheduler", "BaseDataSparsifier", "ScoreSparsifier"]
