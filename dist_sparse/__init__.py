"""Sparsify the embedding tables of TorchRec models during training, the same on every sharding and
number of ranks.

Start with these:

    plan                 what fits a budget of bytes, and which rows training never read
    remove_untouched     remove these rows from a trained model
    export, load_served  write the tables, and serve them
    sparsify             prune a model during training, in one call
    SparseTraining       what it returns: step(), summary(), state_dict(), detach()
    compact              store the kept rows and columns only, and train on
    DataNormSparsifier   masks of the blocks with the smallest norm
    CubicDataScheduler   raises the sparsity level during training
    MaskEnforcer         keeps removed weights at zero in every forward

Smaller tables:      compact, and expand, its inverse
More of sparsify():  Advanced (scores, norms, floors, a guard, rotated columns)
Look:                describe
Other scores:        ImportanceSparsifier (lookups, Adagrad's sums)
Whole rows, columns: ROW and COL, as in sparse_block_shape=(1, ROW) or (COL, 1)
Checkpoints:         Checkpoints (saved whole, verified, resumed on any number of ranks)

More, by module:

    dist_sparse.schedulers  curves: constant, linear, cosine and others
    dist_sparse.extend      base classes for your own masks, scores and schedules
    dist_sparse.ids.counts  count_lookups() and LookupCounts: a record of what was read, without an
                            optimizer

Extras, which the rest works without:

    dist_sparse.extras.report     RunLog, read_run() and write_report(): what happened in a run
    dist_sparse.extras.frontier   frontier(): metrics of a trained model at a few sizes
    dist_sparse.extras.codes      quantize(): a byte per group of columns, in training and serving
    dist_sparse.extras.rotation   Rotation, rotate(): narrower tables, columns by importance
    dist_sparse.extras.guard      Guard: undoes a mask update that costs quality
    dist_sparse.extras.lightning  SparsifyCallback
    dist_sparse.extras.optim      OptimScheduler: optimizer, AMP, clipping, learning rate, sparsity

Names are loaded when they are first used: ``import dist_sparse`` does not need torch, so that
``dist-sparse doctor`` runs where torch is missing or broken. ``__init__.pyi`` has the types.
"""

from importlib import import_module
from pkgutil import iter_modules

_MODULE_OF = {
    "Advanced": "training.arguments",
    "COL": "tables.shards",
    "ROW": "tables.shards",
    "Checkpoints": "checkpoint.checkpoints",
    "CubicDataScheduler": "schedulers",
    "DataNormSparsifier": "sparsifiers.score",
    "ImportanceSparsifier": "sparsifiers.importance",
    "MaskEnforcer": "enforcer.enforcer",
    "SparseTraining": "training.sparsify",
    "compact": "compaction.compact",
    "describe": "sparsifiers.masks",
    "expand": "compaction.compact",
    "export": "serving.export",
    "load_served": "serving.served",
    "plan": "planning.plan",
    "remove_untouched": "remove",
    "sparsify": "training.sparsify",
}

# Names that their own modules list: torch.ao.pruning's, for programs that change an import and go
# on, and counts of lookups.
_ALSO_HERE = {
    "BaseDataScheduler": "schedulers.base",
    "BaseDataSparsifier": "sparsifiers.base",
    "LookupCounts": "ids.counts",
    "count_lookups": "ids.counts",
}

_SUBMODULES = {module.name for module in iter_modules(__path__)}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name == "__version__":
        found: object = import_module("importlib.metadata").version("dist_sparse")
    elif module := (_MODULE_OF | _ALSO_HERE).get(name):
        found = getattr(import_module(f"{__name__}.{module}"), name)
    elif name in _SUBMODULES:
        found = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "__version__"])
