"""Metrics of a trained model at a few sizes of its tables, measured on the user's own data.

Names are loaded when they are first used: ``dist-sparse --help`` imports this package, and needs no
torch. ``__init__.pyi`` has the types.
"""

from importlib import import_module

_MODULE_OF = {
    "BUDGETS": "methods",
    "METHODS": "methods",
    "Frontier": "measure",
    "Trial": "measure",
    "frontier": "measure",
    "serving": "trials",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
