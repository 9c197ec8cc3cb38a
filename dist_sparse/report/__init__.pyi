"""Types of the names that ``__init__.py`` loads when they are first used."""

from dist_sparse.report.page import write_report as write_report
from dist_sparse.report.run import ArtifactBytes as ArtifactBytes
from dist_sparse.report.run import Run as Run
from dist_sparse.report.run import add_artifact as add_artifact
from dist_sparse.report.run import read_run as read_run
from dist_sparse.report.run_log import Quality as Quality
from dist_sparse.report.run_log import RunLog as RunLog
from dist_sparse.report.run_log import Sink as Sink
from dist_sparse.report.run_log import TensorBoardSink as TensorBoardSink
from dist_sparse.report.summary import numbers as numbers

__all__: list[str]
