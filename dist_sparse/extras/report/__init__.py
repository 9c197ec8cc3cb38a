"""What happened in a training run: log it, read it, chart it.

Names are loaded when they are first used: ``dist-sparse inspect`` needs no charts, :class:`RunLog`
no page, and none of them tensorboard or torchrec. ``__init__.pyi`` has the types.
"""

from importlib import import_module

_MODULE_OF = {
    "ArtifactBytes": "run",
    "Quality": "run_log",
    "Run": "run",
    "RunLog": "run_log",
    "Sink": "run_log",
    "TensorBoardSink": "run_log",
    "add_artifact": "run",
    "numbers": "summary",
    "read_run": "run",
    "write_report": "writing",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
