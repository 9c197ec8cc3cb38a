"""What happened in a training run: log it, read it, chart it.

Names are loaded when they are first used: ``dist-sparse inspect`` needs no charts, :class:`RunLog`
no page, and none of them matplotlib, tensorboard or torchrec.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_sparse.report.artifacts import ArtifactBytes, add_artifact
    from dist_sparse.report.page import write_report
    from dist_sparse.report.quality import Quality
    from dist_sparse.report.run import Run, read_run, read_runs
    from dist_sparse.report.run_log import RunLog, Sink
    from dist_sparse.report.sinks import TensorBoardSink, WandbSink
    from dist_sparse.report.summary import numbers

__all__ = [
    "ArtifactBytes",
    "Quality",
    "Run",
    "RunLog",
    "Sink",
    "TensorBoardSink",
    "WandbSink",
    "add_artifact",
    "numbers",
    "read_run",
    "read_runs",
    "write_report",
]

_PLACES = {
    "ArtifactBytes": "artifacts",
    "add_artifact": "artifacts",
    "Quality": "quality",
    "Run": "run",
    "RunLog": "run_log",
    "Sink": "run_log",
    "TensorBoardSink": "sinks",
    "WandbSink": "sinks",
    "numbers": "summary",
    "read_run": "run",
    "read_runs": "run",
    "write_report": "page",
}
"""The module of each other name."""

if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
