"""The command of this extra: `frontier`. Needs no torch."""

import argparse
import re

from dist_sparse.cli.arguments import budget_argument, model_and_evaluate
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
                    type=_parse_share,
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
                    type=_parse_tolerance,
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


def _parse_share(text: str) -> float:
    """Return ``10%`` as 0.1.

    Raises:
        argparse.ArgumentTypeError: not a percentage.
    """
    # Refuses 1 to 99, and asks for the sign.
    if re.fullmatch(r"\d{1,2}", text, re.ASCII):
        budget_argument(text)
    rule = f"share {text!r}: must be a percentage such as 10%, at most 100%"
    return float(_match(r"(100|\d?\d(?:\.\d+)?) ?%", text, rule)[1]) / 100


def _parse_tolerance(text: str) -> float:
    """Return a difference of a metric.

    Raises:
        argparse.ArgumentTypeError: not a number of at least 0.
    """
    rule = f"{text!r}: must be a number such as 0.002, at least 0"
    return float(_match(r"(\d+|\d*\.\d+)(e-\d+)?", text, rule)[0])


def _match(pattern: str, text: str, rule: str) -> re.Match[str]:
    # ASCII: \d would match digits of other scripts.
    match = re.fullmatch(pattern, text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"Invalid {rule}.")
    return match
