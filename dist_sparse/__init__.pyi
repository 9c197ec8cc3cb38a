"""Types of the public names, which ``__init__.py`` loads when they are first used."""

from dist_sparse import checkpoint as checkpoint
from dist_sparse import enforcer as enforcer
from dist_sparse import extend as extend
from dist_sparse import extras as extras
from dist_sparse import groups as groups
from dist_sparse import masking as masking
from dist_sparse import planning as planning
from dist_sparse import schedulers as schedulers
from dist_sparse import serving as serving
from dist_sparse import sparsifiers as sparsifiers
from dist_sparse import tables as tables
from dist_sparse import training as training
from dist_sparse.checkpoint.checkpoints import Checkpoints as Checkpoints
from dist_sparse.compaction.compact import compact as compact
from dist_sparse.compaction.compact import expand as expand
from dist_sparse.enforcer.enforcer import MaskEnforcer as MaskEnforcer
from dist_sparse.ids.counts import LookupCounts as LookupCounts
from dist_sparse.ids.counts import count_lookups as count_lookups
from dist_sparse.planning.plan import plan as plan
from dist_sparse.remove import remove_untouched as remove_untouched
from dist_sparse.schedulers import CubicDataScheduler as CubicDataScheduler
from dist_sparse.schedulers.base import BaseDataScheduler as BaseDataScheduler
from dist_sparse.serving.export import export as export
from dist_sparse.serving.served import load_served as load_served
from dist_sparse.sparsifiers.base import BaseDataSparsifier as BaseDataSparsifier
from dist_sparse.sparsifiers.importance import ImportanceSparsifier as ImportanceSparsifier
from dist_sparse.sparsifiers.masks import describe as describe
from dist_sparse.sparsifiers.score import DataNormSparsifier as DataNormSparsifier
from dist_sparse.tables.shards import COL as COL
from dist_sparse.tables.shards import ROW as ROW
from dist_sparse.training.arguments import Advanced as Advanced
from dist_sparse.training.sparsify import SparseTraining as SparseTraining
from dist_sparse.training.sparsify import sparsify as sparsify

__version__: str
