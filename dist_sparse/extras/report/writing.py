"""The report of a run: one HTML file, and each chart as an SVG file of its own."""

from pathlib import Path

from dist_sparse.checks import write_whole
from dist_sparse.extras.report.charts import charts
from dist_sparse.extras.report.run import Run, read_run

_REPORT = "report.html"


def write_report(
    run: Run | str | Path, out: str | Path | None = None, *, svg: str | Path | None = None
) -> Path:
    """Write the report of a run, with the config and the command of its script.

    An existing file is replaced once the new one is complete. A symbolic link is replaced, not
    followed.

    Args:
        run: folder that a :class:`~dist_sparse.extras.report.RunLog` wrote, or the
            :class:`~dist_sparse.extras.report.Run` read from it.
        out: the HTML file; ``report.html`` in the folder by default.
        svg: folder, created if missing, in which each chart is written as ``<chart>.svg`` too.

    Returns:
        ``out``.

    Raises:
        ValueError: there is no such run, or it cannot be read, or ``out`` is not a regular file;
            names the file.
        ImportError: jinja2 or matplotlib is not installed.
        OSError: a file can't be written. The old one is as it was.

    Example::

        >>> import tempfile
        >>> from dist_sparse.extras.report import RunLog, write_report
        >>> folder = tempfile.mkdtemp()
        >>> with RunLog(folder) as log:
        ...     log.step(0, loss=0.5)
        >>> write_report(folder).name
        'report.html'
    """
    # Here, so that programs can import this function without them.
    try:
        from dist_sparse.extras.report.drawing import svg_of
        from dist_sparse.extras.report.page import page
    except ModuleNotFoundError as error:
        raise ImportError(
            f"needs {error.name}, which is not installed: pip install jinja2 matplotlib"
        ) from error
    run = run if isinstance(run, Run) else read_run(run)
    out = Path(out or run.folder / _REPORT)
    figures = charts(run)
    # All are rendered before the first is written: an error leaves the old files.
    contents = {out: page(run, figures).encode()}
    if svg is not None:
        contents |= {Path(svg) / f"{chart.key}.svg": svg_of(chart).encode() for chart in figures}
    for file, content in contents.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Readable by all: a report is shared. The log beside it stays private.
        write_whole(file, content, shared=True)
    return out
