"""Subcommands `plan` and `frontier`: what a model can be served in, and what it is worth then."""

from __future__ import annotations

import argparse
import json

from dist_sparse.cli.arguments import model_and_evaluate, model_from, parse_budget, parse_share
from dist_sparse.cli.output import quiet, show
from dist_sparse.cli.parsing import STATUS, Commands, add_json, subcommand

_PLAN = f"""examples:
  dist-sparse plan my.package:model --budget 10% --rotate user,item
  dist-sparse plan model.py:trained --budget 512KiB

FUNCTION takes no arguments and returns a trained model, which is not changed.
`dist-sparse frontier` measures what fits on the trained model.

{STATUS}
"""

_FRONTIER = f"""examples:
  dist-sparse frontier model.py:measured --out runs/frontier
  dist-sparse frontier my.package:measured --rotate user,item --budget 10%

FUNCTION returns (model, evaluate); evaluate(model) returns metrics by name, on
data that the model was not trained on. If it has the parameter columns, it is
called again with fractions of them, for models with smaller tables. With the
same --out, an interrupted run goes on.

{STATUS}
"""


def add_plan(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.planning.plan import plan

        quiet()
        answer = plan(model_from(options.function), options.budget, rotate=options.rotate)
        return show(json.dumps(answer.to_json(), indent=2) if options.json else str(answer))

    parser = subcommand(commands, "plan", "shows what a budget of bytes can hold", _PLAN)
    add = parser.add_argument
    add(
        "--budget",
        type=parse_budget,
        metavar="SIZE",
        required=True,
        help="bytes to serve, such as 10%% or 512MiB",
    )
    _add_common(parser)
    parser.set_defaults(run=run)


def add_frontier(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.planning.frontier import BUDGETS, frontier

        # Before the import of TorchRec, which logs at once.
        quiet()
        found = frontier(
            *model_and_evaluate(options.function),
            budgets=options.budget or BUDGETS,
            methods=options.method,
            rotate=options.rotate or "table",
            lower_is_better=options.less or ("ne", "loss"),
            metric=options.metric,
            tolerance=options.tolerance,
            out=options.out,
        )
        return show(json.dumps(found.to_json(), indent=2) if options.json else str(found))

    purpose = "measures what a trained model is worth at a few sizes"
    parser = subcommand(commands, "frontier", purpose, _FRONTIER)
    add = parser.add_argument
    add(
        "--budget",
        type=parse_share,
        action="append",
        metavar="SHARE",
        help="of the bytes; default: 50%%, 20%%, 10%%, 5%%",
    )
    add(
        "--method",
        action="append",
        help="bits, untouched, small, rotated, rows, mix, column or codes; default: all",
    )
    add("--metric", help="by which they are compared; default: the first that evaluate returns")
    add(
        "--less",
        action="append",
        metavar="METRIC",
        help="a metric of which less is better; default: ne, loss",
    )
    add(
        "--tolerance",
        type=float,
        default=0.002,
        metavar="X",
        help="smaller differences do not count; default: 0.002",
    )
    add(
        "--out",
        metavar="DIR",
        help="writes frontier.json and trials.jsonl there, and goes on from the latter",
    )
    _add_common(parser)
    parser.set_defaults(run=run)


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Add the model, its rotated tables, and --json."""
    add = parser.add_argument
    add("function", metavar="FUNCTION", help="package.module:function or file.py:function")
    add(
        "--rotate",
        type=lambda names: names.split(","),
        action="append",
        metavar="A,B",
        help="tables that only dot products between them read",
    )
    add_json(parser)
