"""The command of this extra: `frontier`. Needs no torch."""

import argparse

from dist_sparse.cli.arguments import model_and_evaluate, parse_share, parse_tolerance
from dist_sparse.cli.commands import (
    FUNCTION,
    JSON,
    ROTATE,
    Command,
    option,
    print_result,
    silence_torchrec,
)
from dist_sparse.extras.frontier.methods import BUDGETS, METHODS


def commands() -> list[Command]:
    """Return the command."""
    return [
        Command(
            name="frontier",
            topic="size",
            purpose="measures what a trained model is worth at a few sizes",
            run=_frontier,
            epilog="""\
  dist-sparse frontier model.py:measured --out runs/frontier
  dist-sparse frontier my.package:measured --rotate user,item --budget 10%

Measures what `dist-sparse plan` lists. FUNCTION returns (model, evaluate);
evaluate(model) returns metrics by name, on held-out data. If it has the
parameter columns, it is called again with fractions of them, for models with
smaller tables.
""",
            options=[
                option(
                    "--budget",
                    help="of the bytes; default: 50%%, 20%%, 10%%, 5%%",
                    type=parse_share,
                    action="append",
                    metavar="SHARE",
                ),
                option(
                    "--method",
                    help="%(choices)s; may be repeated; default: all",
                    choices=tuple(METHODS),
                    action="append",
                    metavar="METHOD",
                ),
                option(
                    "--metric",
                    help="by which they are compared; default: the first that evaluate returns",
                ),
                option(
                    "--less",
                    help="a metric that is better when lower; default: ne, loss",
                    action="append",
                    metavar="METRIC",
                ),
                option(
                    "--tolerance",
                    help="smaller differences do not count; default: 0.002",
                    type=parse_tolerance,
                    default=0.002,
                    metavar="X",
                ),
                option(
                    "--out",
                    help="for frontier.json and trials.jsonl; continues an interrupted run",
                    metavar="DIR",
                ),
                FUNCTION,
                ROTATE,
                JSON,
            ],
        )
    ]


def _frontier(options: argparse.Namespace) -> int:
    from dist_sparse.extras.frontier.measure import frontier

    silence_torchrec()
    measured = frontier(
        *model_and_evaluate(options.function),
        budgets=options.budget or BUDGETS,
        methods=options.method,
        rotate=options.rotate or "table",
        lower_is_better=options.less or ("ne", "loss"),
        metric=options.metric,
        tolerance=options.tolerance,
        out=options.out,
    )
    return print_result(options, measured.to_json(), str(measured))
