"""What happened in a training run: log it, read it, chart it.

Names are loaded when they are first used: ``dist-sparse inspect`` needs no charts, :class:`RunLog`
no page, and none of them tensorboard or torchrec. ``__init__.pyi`` has the types.
"""

from dist_sparse.lazy import loaded_when_used

_MODULE_OF = {
    "ArtifactBytes": "run",
    "MLflowSink": "run_log",
    "Quality": "run_log",
    "Run": "run",
    "RunLog": "run_log",
    "Sink": "run_log",
    "TensorBoardSink": "run_log",
    "WandbSink": "run_log",
    "add_artifact": "run",
    "numbers": "summary",
    "read_run": "run",
    "write_report": "writing",
}

__all__ = sorted(_MODULE_OF)
__getattr__, __dir__ = loaded_when_used(__name__, _MODULE_OF)
