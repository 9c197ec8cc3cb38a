"""Metrics of a trained model at a few sizes of its tables, measured on the user's own data.

Names are loaded when they are first used: ``dist-sparse --help`` imports this package, and needs no
torch. ``__init__.pyi`` has the types.
"""

from dist_sparse.lazy import loaded_when_used

_MODULE_OF = {
    "BUDGETS": "methods",
    "METHODS": "methods",
    "Frontier": "measure",
    "Trial": "measure",
    "frontier": "measure",
    "serving": "trials",
}

__all__ = sorted(_MODULE_OF)
__getattr__, __dir__ = loaded_when_used(__name__, _MODULE_OF)
