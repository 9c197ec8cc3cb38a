"""Subcommands `inspect` and `report`: what runs and checkpoints hold, as text, JSON and pages."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from dist_sparse.cli.output import fail, show
from dist_sparse.cli.parsing import STATUS, Commands, add_json, subcommand

if TYPE_CHECKING:
    from dist_sparse.report.run import Run

_INSPECT = f"""examples:
  dist-sparse inspect runs/latest
  dist-sparse inspect saved/step-00001000

RUN is a folder that RunLog wrote, or one of Checkpoints: all steps are listed;
of one step, every byte is verified and each tensor is shown.

{STATUS}
"""

_REPORT = f"""examples:
  dist-sparse report runs/latest
  dist-sparse report runs/latest --open
  dist-sparse report runs/a runs/b runs/c --out comparison.html --svg charts

RUN is a folder that RunLog wrote; runs/latest is the one in runs that was
started last. The first RUN is compared with the others; one alone with the runs
in folders inside its own. jinja2 is needed, which torch brings.

{STATUS}
"""

_COMPARISON = "comparison.html"


def add_inspect(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.checkpoint.folders import holds_steps
        from dist_sparse.report.run import read_run
        from dist_sparse.report.summary import inspect_text

        # A folder of checkpoints has no JSON form.
        if holds_steps(options.folder) and not options.json:
            # Needs torch, unlike runs.
            from dist_sparse.checkpoint.checkpoints import summary

            return show(summary(options.folder))
        run = read_run(options.folder)
        return show(_json(run) if options.json else inspect_text(run))

    parser = subcommand(
        commands, "inspect", "shows the tables and the config of a run, or a checkpoint", _INSPECT
    )
    parser.add_argument("folder", metavar="RUN", help="the folder of the run, or of checkpoints")
    add_json(parser)
    parser.set_defaults(run=run)


def add_report(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        import webbrowser

        from dist_sparse.report.page import write_report
        from dist_sparse.report.run import read_run
        from dist_sparse.report.summary import summary

        run = read_run(*options.folders)
        # A comparison does not replace the report of its first run.
        default = run.folder / _COMPARISON if len(options.folders) > 1 else None
        page = write_report(run, options.out or default, svg=options.svg).resolve()
        shown = show(_json(run) if options.json else summary(run, page))
        # After the numbers: they are there even without a browser.
        if options.open and not webbrowser.open(page.as_uri()):
            return fail("report", f"no browser was found to open {page.as_uri()}")
        return shown

    parser = subcommand(commands, "report", "writes charts of runs as one HTML file", _REPORT)
    parser.add_argument("folders", nargs="+", metavar="RUN", help="the folder of a run")
    default = f"RUN/report.html, of several runs {_COMPARISON} in the first"
    parser.add_argument("--out", metavar="FILE", help=f"the HTML file; default: {default}")
    parser.add_argument("--open", action="store_true", help="opens the page in the browser")
    parser.add_argument(
        "--svg", metavar="DIR", help="writes each chart as an SVG file too, into this folder"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _json(run: Run) -> str:
    from dist_sparse.report.summary import numbers

    return json.dumps(numbers(run), indent=2, allow_nan=False)
