"""Types of the public names, which ``__init__.py`` loads when they are first used."""

from typing import Required, TypedDict

from dist_sparse import checkpoint as checkpoint
from dist_sparse import codes as codes
from dist_sparse import compat as compat
from dist_sparse import enforcer as enforcer
from dist_sparse import extend as extend
from dist_sparse import groups as groups
from dist_sparse import lightning as lightning
from dist_sparse import masking as masking
from dist_sparse import optim as optim
from dist_sparse import planning as planning
from dist_sparse import report as report
from dist_sparse import schedulers as schedulers
from dist_sparse import serving as serving
from dist_sparse import slots as slots
from dist_sparse import sparsifiers as sparsifiers
from dist_sparse import tables as tables
from dist_sparse import training as training
from dist_sparse.checkpoint.checkpoints import Checkpoints as Checkpoints
from dist_sparse.codes.quantize import quantize as quantize
from dist_sparse.compaction.compact import compact as compact
from dist_sparse.compaction.compact import expand as expand
from dist_sparse.compaction.following import following as following
from dist_sparse.enforcer.enforcer import MaskEnforcer as MaskEnforcer
from dist_sparse.optim.scheduler import ExponentDecayLr as ExponentDecayLr
from dist_sparse.optim.scheduler import Noamlr as Noamlr
from dist_sparse.optim.scheduler import OptimScheduler as OptimScheduler
from dist_sparse.planning.frontier import frontier as frontier
from dist_sparse.planning.plan import plan as plan
from dist_sparse.records import TableStats as TableStats
from dist_sparse.report.run_log import RunLog as RunLog
from dist_sparse.rotation.rotate import Rotate
from dist_sparse.rotation.rotate import rotate as rotate
from dist_sparse.schedulers import ConstantDataScheduler as ConstantDataScheduler
from dist_sparse.schedulers import CosineDataScheduler as CosineDataScheduler
from dist_sparse.schedulers import CubicDataScheduler as CubicDataScheduler
from dist_sparse.schedulers import ExponentialDataScheduler as ExponentialDataScheduler
from dist_sparse.schedulers import LambdaDataScheduler as LambdaDataScheduler
from dist_sparse.schedulers import LinearDataScheduler as LinearDataScheduler
from dist_sparse.schedulers import OneShotDataScheduler as OneShotDataScheduler
from dist_sparse.schedulers.base import BaseDataScheduler as BaseDataScheduler
from dist_sparse.serving.export import export as export
from dist_sparse.serving.served import load_served as load_served
from dist_sparse.slots.tables import FollowingTables as FollowingTables
from dist_sparse.sparsifiers.base import BaseDataSparsifier as BaseDataSparsifier
from dist_sparse.sparsifiers.importance import ImportanceSparsifier as ImportanceSparsifier
from dist_sparse.sparsifiers.importance import Score
from dist_sparse.sparsifiers.masks import describe as describe
from dist_sparse.sparsifiers.score import BlockShape, Norm, Scope
from dist_sparse.sparsifiers.score import DataNormSparsifier as DataNormSparsifier
from dist_sparse.sparsifiers.score import ScoreSparsifier as ScoreSparsifier
from dist_sparse.tables.shards import COL as COL
from dist_sparse.tables.shards import ROW as ROW
from dist_sparse.training.arguments import Levels, OptimizerState, Schedule
from dist_sparse.training.sparsify import SparseTraining as SparseTraining
from dist_sparse.training.sparsify import sparsify as sparsify

__version__: str

class SparsifyKeywords(TypedDict, total=False):
    """Keywords of :func:`sparsify` that its Lightning callback takes too."""

    level: Levels | None
    budget: float | str | None
    scope: Scope
    floor: Levels | None
    protect: str | list[str] | None
    end: Required[int | None]
    begin: int
    every: int
    block: BlockShape
    norm: Norm | None
    score: Score | None
    include: str | list[str] | None
    exclude: str | list[str] | None
    dense: bool | str | list[str] | None
    schedule: Schedule | None
    optimizer_state: OptimizerState
    min_rows: int
    rotate: Rotate | None
    decay: float | None
