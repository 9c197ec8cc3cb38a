"""The commands of this extra: `inspect` and `report`. Needs no torch."""

import argparse

from dist_sparse.cli.arguments import existing_path
from dist_sparse.cli.commands import (
    JSON,
    Command,
    option,
    print_failure,
    print_result,
    print_text,
)

_COMPARISON = "comparison.html"

# dist_sparse.serving.artifact.MANIFEST: that module needs torch.
_MANIFEST = "manifest.json"


def commands() -> list[Command]:
    """Return the commands."""
    return [
        Command(
            name="inspect",
            topic="runs",
            purpose="shows the tables and the config of a run, or a checkpoint",
            run=_inspect,
            epilog="""\
  dist-sparse inspect runs/latest
  dist-sparse inspect saved/step-00001000

RUN is a folder that RunLog wrote, or one of Checkpoints: all steps are listed;
of one step, every byte is verified and each tensor is shown.
""",
            options=[
                option(
                    "folder",
                    help="the folder of the run, or of checkpoints",
                    type=existing_path,
                    metavar="RUN",
                ),
                JSON,
            ],
        ),
        Command(
            name="report",
            topic="runs",
            purpose="writes charts of runs as one HTML file",
            run=_report,
            epilog="""\
  dist-sparse report runs/latest
  dist-sparse report runs/a runs/b runs/c --out comparison.html --svg charts

RUN is a folder that RunLog wrote; runs/latest is the one in runs that was
started last. The first RUN is compared with the others; one alone with the runs
in folders inside its own.
""",
            options=[
                option(
                    "folders",
                    help="the folder of a run",
                    nargs="+",
                    type=existing_path,
                    metavar="RUN",
                ),
                option(
                    "--out",
                    help=f"the HTML file; default: RUN/report.html, of several runs {_COMPARISON}"
                    " in the first",
                    metavar="FILE",
                ),
                option("--open", help="opens the page in the browser", action="store_true"),
                option(
                    "--svg", help="writes each chart as SVG too, into this folder", metavar="DIR"
                ),
                JSON,
            ],
        ),
    ]


def _inspect(options: argparse.Namespace) -> int:
    from dist_sparse.extras.report.folder import RUN
    from dist_sparse.extras.report.run import read_run
    from dist_sparse.extras.report.summary import inspect_text, numbers

    folder = options.folder
    is_step = folder.name.startswith("step-") or any(folder.glob("step-*"))
    is_run = options.json or (folder / RUN).is_file()
    # Checkpoints have no JSON form.
    if is_step and not is_run:
        # Imported here: it needs torch, and runs are read without torch.
        from dist_sparse.checkpoint.checkpoints import checkpoint_summary

        return print_text(checkpoint_summary(folder))
    if (folder / _MANIFEST).is_file() and not (folder / RUN).is_file():
        raise ValueError(
            f"{folder} holds an artifact or a delta, and no run: dist-sparse serve-check shows it."
        )
    run = read_run(folder)
    return print_result(options, numbers(run), inspect_text(run))


def _report(options: argparse.Namespace) -> int:
    import webbrowser

    from dist_sparse.extras.report.run import read_run
    from dist_sparse.extras.report.summary import numbers, summary
    from dist_sparse.extras.report.writing import write_report

    run = read_run(*options.folders)
    # A name of its own: the comparison must not replace the report of its first run.
    default = run.folder / _COMPARISON if len(options.folders) > 1 else None
    page = write_report(run, options.out or default, svg=options.svg).resolve()
    status = print_result(options, numbers(run), summary(run, page))
    # After the numbers, so that a machine without a browser prints them too.
    if options.open and not webbrowser.open(page.as_uri()):
        return print_failure("report", f"no browser was found to open {page.as_uri()}")
    return status
