"""Sparsify the embedding tables of TorchRec models during training, the same on every sharding and
number of ranks.

Start with these five:

    sparsify             prune a model during training, in one call
    SparseTraining       what it returns: step(), summary(), state_dict(), detach()
    DataNormSparsifier   masks of the blocks with the smallest norm
    CubicDataScheduler   raises the sparsity level during training
    MaskEnforcer         keeps removed weights at zero in every forward

Before training:     plan (what fits a budget of bytes, and which of it to use)
A trained model:     frontier (its metrics at a few sizes)
Serving:             export, load_served
Smaller tables:      compact (store kept rows and columns only, train on), and expand, its inverse
Codes:               quantize (a byte per group of columns, in training and serving)
Narrower tables:     rotate (columns by importance), or sparsify(block="col", rotate=...)
Look and log:        describe, TableStats, RunLog
Other scores:        ImportanceSparsifier (lookups, Adagrad's sums)
Whole rows, columns: ROW and COL, as in sparse_block_shape=(1, ROW) or (COL, 1)
Checkpoints:         Checkpoints (saved whole, verified, resumed on any number of ranks)

More, by module:

    dist_sparse.schedulers  curves: constant, linear, cosine and others
    dist_sparse.extend      base classes for your own masks, scores and schedules
    dist_sparse.optim       OptimScheduler: optimizer, AMP, clipping, learning rate, sparsity
    dist_sparse.lightning   SparsifyCallback
    dist_sparse.slots       following() and FollowingTables: rows for the most looked-up ids
    dist_sparse.compat      SpeeChain's learning rates, under their original names

Names are loaded when they are first used: ``import dist_sparse`` does not need torch, so that
``dist-sparse doctor`` runs where torch is missing or broken. ``__init__.pyi`` has the types.
"""

from importlib import import_module
from pkgutil import iter_modules

_MODULE_OF = {
    "COL": "tables.shards",
    "ROW": "tables.shards",
    "Checkpoints": "checkpoint.checkpoints",
    "CubicDataScheduler": "schedulers",
    "DataNormSparsifier": "sparsifiers.score",
    "ImportanceSparsifier": "sparsifiers.importance",
    "MaskEnforcer": "enforcer.enforcer",
    "RunLog": "report.run_log",
    "SparseTraining": "training.sparsify",
    "TableStats": "records",
    "compact": "compaction.compact",
    "describe": "sparsifiers.masks",
    "expand": "compaction.compact",
    "export": "serving.export",
    "frontier": "planning.frontier",
    "load_served": "serving.served",
    "plan": "planning.plan",
    "quantize": "codes.quantize",
    "rotate": "rotation.rotate",
    "sparsify": "training.sparsify",
}

# Names that can be imported from here, and are listed by their own modules. slots needs
# TorchRec.
_MOVED = {
    "BaseDataScheduler": "schedulers.base",
    "BaseDataSparsifier": "sparsifiers.base",
    "ConstantDataScheduler": "schedulers",
    "CosineDataScheduler": "schedulers",
    "ExponentDecayLr": "optim.scheduler",
    "ExponentialDataScheduler": "schedulers",
    "FollowingTables": "slots.tables",
    "LambdaDataScheduler": "schedulers",
    "LinearDataScheduler": "schedulers",
    "Noamlr": "optim.scheduler",
    "OneShotDataScheduler": "schedulers",
    "OptimScheduler": "optim.scheduler",
    "ScoreSparsifier": "sparsifiers.score",
    "following": "compaction.following",
}

_SUBMODULES = {module.name for module in iter_modules(__path__)}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name == "__version__":
        found: object = import_module("importlib.metadata").version("dist_sparse")
    elif module := (_MODULE_OF | _MOVED).get(name):
        found = getattr(import_module(f"{__name__}.{module}"), name)
    elif name in _SUBMODULES:
        found = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "__version__"])
