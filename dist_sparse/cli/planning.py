"""Subcommands `plan` and `frontier`: what a model can be served in, and what it is worth then."""

from __future__ import annotations

import argparse
import json
import re
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from dist_sparse.cli.arguments import (
    EntryError,
    model_and_batches,
    model_and_evaluate,
    parse_block,
    parse_budget,
    parse_count,
    parse_level,
    parse_share,
)
from dist_sparse.cli.output import fail, show
from dist_sparse.cli.parsing import STATUS, Commands, add_json, subcommand
from dist_sparse.cli.quiet import quiet

if TYPE_CHECKING:
    from dist_sparse.planning.dry_run import DryRun
    from dist_sparse.planning.plan import Plan

__all__ = ["add_frontier", "add_plan"]

_PLAN = f"""examples:
  dist-sparse plan my.package:model --budget 10% --rotate user,item
  dist-sparse plan model.py:trained --budget 512KiB --cold 'user_x_*'
  dist-sparse plan model.py:measured --budget 10% --measure
  dist-sparse plan model.py:trained --level 0.8 --block 1x4 --exclude 'small_*'

FUNCTION takes no arguments and returns (model, batches); batches may be None.
The model is not changed.

--budget shows the dtypes, widths and rows that fit, what they take, and which
to use; --rotate and --cold say what may be done to which tables.
--level shows which weights a sparsity level would prune, and how many lookups
in the batches would read them; --block, --norm and --batches belong to it.
--measure tries what fits a budget on the trained model, for which FUNCTION
returns (model, evaluate), as for `dist-sparse frontier`; --metric, --less,
--tolerance and --out belong to it.

{STATUS}
"""

_FRONTIER = f"""examples:
  dist-sparse frontier model.py:measured --out runs/frontier
  dist-sparse frontier my.package:measured --rotate user,item --budget 10%

FUNCTION takes no arguments and returns (model, evaluate); evaluate(model)
returns metrics by name, on data that the model was not trained on. If it has
the parameters columns and rows, it is called again with fractions of them, and
returns a model trained with smaller tables, and one with hashed ids, to compare
with. A run that is interrupted goes on where it was if --out is the same. Bytes
are those that would be served, indexes, scales and masks counted.

{STATUS}
"""


_MODES: Final = {
    **dict.fromkeys(("--block", "--norm", "--batches"), ("--level",)),
    **dict.fromkeys(("--rotate", "--cold"), ("--budget", "--measure")),
    **dict.fromkeys(("--metric", "--less", "--tolerance", "--out"), ("--measure",)),
}
"""Options of `plan` that only some of its modes read: they are refused in others."""

_OPTIONS: Final = {
    "entry": "FUNCTION",
    "budgets": "--budget",
    "methods": "--method",
    "dtypes": "--dtype",
    "lower_is_better": "--less",
    **{name: f"--{name}" for name in ("budget", "cold", "exclude", "include", "metric", "protect", "rotate")},
    "tolerance": "--tolerance",
}
"""What a user typed, by the argument that it becomes."""


def add_plan(commands: Commands) -> None:
    def measure(options: argparse.Namespace) -> int:
        from dist_sparse.planning.frontier import measure_plan
        from dist_sparse.planning.plan import plan

        try:
            model, evaluate, _ = model_and_evaluate(options.function)
            how = {"rotate": options.rotate, "cold": options.cold}
            answer = plan(model, options.budget, **how, include=options.include, exclude=options.exclude)
            found = measure_plan(model, evaluate, answer, **_measuring(options))
        except (ValueError, OSError) as error:
            return _failed("plan", error)
        if options.json:
            return show(json.dumps({"plan": answer.to_json(), "measured": found.to_json()}, indent=2))
        return show(f"{answer}\n\n{found}")

    def run(options: argparse.Namespace) -> int:
        mode = "--measure" if options.measure else "--level" if options.budget is None else "--budget"
        for option, modes in _MODES.items():
            if mode not in modes and getattr(options, option.removeprefix("--")) is not None:
                parser.error(f"{option} is for {' and '.join(modes)}.")
        if options.measure and options.budget is None:
            parser.error("--measure is for --budget.")
        quiet()
        if options.measure:
            return measure(options)
        chosen = {"include": options.include, "exclude": options.exclude}
        answer: Plan | DryRun
        try:
            model, batches = model_and_batches(options.function)
            if options.budget is not None:
                from dist_sparse.planning.plan import plan

                answer = plan(model, options.budget, rotate=options.rotate, cold=options.cold, **chosen)
            else:
                from dist_sparse.planning.dry_run import dry_run

                some = None if batches is None else islice(batches, options.batches)
                how: dict[str, Any] = {"block": options.block or (1, "ROW"), "norm": options.norm or "L2"}
                answer = dry_run(model, level=options.level, batches=some, **how, **chosen)
        except ValueError as error:
            return _failed("plan", error)
        return show(json.dumps(answer.to_json(), indent=2) if options.json else str(answer))

    parser = subcommand(commands, "plan", "shows what a budget of bytes can hold, or what a level would prune", _PLAN)
    parser.add_argument("function", metavar="FUNCTION", help="package.module:function or file.py:function")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--budget", type=parse_budget, metavar="SIZE", help="bytes to serve, such as 10%% or 512MiB")
    target.add_argument("--level", type=parse_level, help="sparsity level of every table, 0 to 1")
    parser.add_argument(
        "--measure", action="store_true", help="tries what fits the budget; FUNCTION returns (model, evaluate)"
    )
    parser.add_argument(
        "--rotate",
        type=lambda names: names.split(","),
        action="append",
        metavar="A,B",
        help="tables that only dot products between them read; may be repeated",
    )
    parser.add_argument("--cold", action="append", metavar="GLOB", help="tables of cold crossed features")
    parser.add_argument("--block", type=parse_block, help="such as 1x4, row or col; default: row")
    parser.add_argument("--norm", type=str.upper, choices=("L1", "L2"), help="default: L2")
    parser.add_argument("--batches", type=parse_count, metavar="N", help="reads the first N; default: all")
    parser.add_argument("--include", action="append", metavar="GLOB", help="tables, all by default; may be repeated")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="tables to leave out; may be repeated")
    _add_measuring(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def add_frontier(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.planning.frontier import BUDGETS, frontier

        quiet()
        try:
            found = frontier(
                *model_and_evaluate(options.function),
                budgets=options.budget or BUDGETS,
                methods=options.method,
                dtypes=options.dtype or ("fp32", "int8", "int4"),
                rotate=options.rotate or "table",
                protect=options.protect,
                **_measuring(options),
            )
        except (ValueError, OSError) as error:
            return _failed("frontier", error)
        return show(json.dumps(found.to_json(), indent=2) if options.json else str(found))

    parser = subcommand(commands, "frontier", "measures what a trained model is worth at a few sizes", _FRONTIER)
    add = parser.add_argument
    add("function", metavar="FUNCTION", help="package.module:function or file.py:function")
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
        help="bits, untouched, small, columns, rotated, rows, blocks, elements, mix or hashed; default: all",
    )
    add(
        "--rotate",
        type=lambda names: names.split(","),
        action="append",
        metavar="A,B",
        help="tables that only dot products between them read; default: each by itself, turned back",
    )
    add("--dtype", action="append", help="fp32, fp16, int8 or int4, to store what is left in; default: all but fp16")
    add("--protect", action="append", metavar="GLOB", help="tables that keep all rows")
    _add_measuring(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--metric", help="by which they are compared; default: the first that evaluate returns")
    add("--less", action="append", metavar="METRIC", help="a metric of which less is better; default: ne, loss")
    add("--tolerance", type=float, metavar="X", help="smaller differences do not count; default: 0.002")
    add("--out", metavar="DIR", help="writes the table, a plot and trials.jsonl there, and goes on from the latter")


def _failed(command: str, error: Exception) -> int:
    """Print an error, with the option that was typed in the place of the argument that it becomes."""

    def typed(found: re.Match[str]) -> str:
        return f"Invalid {_OPTIONS.get(found[1], found[1])}"

    message = re.sub(r"^Invalid (\w+)", typed, str(error))
    if isinstance(error, EntryError):
        message += f"\nUsage and options: dist-sparse {command} --help"
    return fail(command, message)


def _measuring(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of _add_measuring that were given."""
    given = {"metric": options.metric, "lower_is_better": options.less, "tolerance": options.tolerance}
    return {name: value for name, value in {**given, "out": options.out}.items() if value is not None}
