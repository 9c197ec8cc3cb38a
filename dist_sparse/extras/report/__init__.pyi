"""Types of the names that ``__init__.py`` loads when they are first used."""

from dist_sparse.extras.report.run import ArtifactBytes as ArtifactBytes
from dist_sparse.extras.report.run import Run as Run
from dist_sparse.extras.report.run import add_artifact as add_artifact
from dist_sparse.extras.report.run import read_run as read_run
from dist_sparse.extras.report.run_log import MLflowSink as MLflowSink
from dist_sparse.extras.report.run_log import Quality as Quality
from dist_sparse.extras.report.run_log import RunLog as RunLog
from dist_sparse.extras.report.run_log import Sink as Sink
from dist_sparse.extras.report.run_log import TensorBoardSink as TensorBoardSink
from dist_sparse.extras.report.run_log import WandbSink as WandbSink
from dist_sparse.extras.report.summary import numbers as numbers
from dist_sparse.extras.report.writing import write_report as write_report

__all__: list[str]
