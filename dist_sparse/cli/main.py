"""The command `dist-sparse`: each subcommand parses, calls one function of the package and prints
the result.

A subcommand imports its function, and torch with it, when it runs: `--help` and `doctor` need no
torch. Exit status 2 means that the command line has to be changed: an option, a path that does not
exist, or FUNCTION. 1 is any other failure that a user can fix (a ValueError, a file that can't be
read or written, a missing package). Both print a sentence or two; other exceptions keep their
traceback.
"""

import argparse
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path

import dist_sparse
from dist_sparse.cli.arguments import (
    EntryError,
    existing_path,
    model_and_evaluate,
    model_and_optimizer,
    parse_budget,
    parse_share,
    parse_tolerance,
)
from dist_sparse.launch.__main__ import Option, Parser, as_typed, option
from dist_sparse.launch.__main__ import main as launch
from dist_sparse.text import printable, wrapped

_DESCRIPTION = "Plans what embedding tables can lose; launches, reports on and checks training."

_STATUS = "exit status: 0 success, 1 failure, 2 wrong command line"

_EXAMPLES = f"""examples:
  dist-sparse doctor                              can this machine train?
  dist-sparse launch --nproc 2 train.py           train on two processes
  dist-sparse plan model.py:trained --budget 10%  what 10% of the bytes can hold

{_STATUS}
Options of a command: dist-sparse COMMAND --help
"""

_COMPARISON = "comparison.html"


def main(words: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``words`` (``sys.argv[1:]`` by default) name; return the exit status.

    0 is success, 1 a failure that stderr explains, 2 an invalid command line, 130
    Ctrl-C, 141 a closed pipe; `launch` has others.
    """
    # The C locale is ASCII: print() would raise on other names of tables.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run_command(list(sys.argv[1:] if words is None else words))
    except SystemExit:
        # argparse exits after --help, whose text may still be buffered: flush it here, so that a
        # full disk or a closed pipe is reported like any other.
        if status := _print_text("", end=""):
            return status
        raise
    except KeyboardInterrupt:
        print("dist-sparse: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run_command(words: list[str]) -> int:
    if words in ([], ["help"]):
        return _print_text(parser().format_help().rstrip())
    if words[0] in ("-V", "--version"):
        return _print_text(f"dist-sparse {dist_sparse.__version__}")
    if words[0] == "launch":
        # It parses for itself, `--help` included.
        return launch(words[1:], prog="dist-sparse launch")
    options = parser().parse_args(words)
    name = options.command
    try:
        return _COMMANDS[name][0](options)
    except EntryError as error:
        what = f"Invalid FUNCTION={options.function!r}: {error}"
        _print_failure(name, f"{what}\nUsage and options: dist-sparse {name} --help")
        return 2
    except ModuleNotFoundError as error:
        # Subcommands import lazily: this is the first time that the package was needed.
        how = "; dist-sparse doctor prints how to install it." if error.name == "torch" else "."
        return _print_failure(name, f"needs {error.name}, which is not installed{how}")
    except (ValueError, OSError, ImportError) as error:
        text = as_typed(str(error), _TYPED)
        # 2: the value of an option has to be changed.
        return _print_failure(name, text) + text.startswith("Invalid --")


# Options by the names of their Python arguments.
_TYPED = {"path": "--out", "methods": "--method"}
_TYPED |= {name: f"--{name}" for name in ("out", "metric", "rotate")}


def parser() -> Parser:
    """Return the parser of `dist-sparse`, for tools that complete commands in a shell."""
    raw = argparse.RawDescriptionHelpFormatter
    whole = Parser(
        prog="dist-sparse", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw
    )
    whole.add_argument("-V", "--version", action="store_true", help="shows the version")
    commands = whole.add_subparsers(
        metavar="COMMAND", title="commands", dest="command", required=True
    )
    what = "starts a script on several processes, or writes files for Slurm and Kubeflow"
    commands.add_parser("launch", help=what)
    for name, (_, purpose, epilog, options) in _COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=purpose,
            description=f"{purpose[0].upper()}{purpose[1:]}.",
            epilog=f"examples:\n{epilog}\n{_STATUS}\n",
            formatter_class=raw,
            # A new option could make an abbreviation in a user's script ambiguous.
            allow_abbrev=False,
        )
        for flags, settings in options:
            subparser.add_argument(*flags, **settings)
    return whole


# Output: text on stdout, one sentence per failure on stderr. Each function returns the exit status.


def _print_text(text: str, end: str = "\n") -> int:
    try:
        # Flushed now: at exit, Python would report a full disk with a traceback.
        print(text, end=end, flush=True)
    except OSError as error:
        # Python flushes stdout again when it exits, and would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            # The status of a program that SIGPIPE ends, as in `... | head`.
            return 128 + signal.SIGPIPE
        print(f"dist-sparse: can't write to standard output: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _print_result(options: argparse.Namespace, value: object, text: str) -> int:
    """Print ``value`` as JSON if --json was given, else ``text``."""
    return _print_text(json.dumps(value, indent=2, allow_nan=False) if options.json else text)


def _print_failure(command: str, why: str) -> int:
    """Print to stderr, in lines that fit the terminal."""
    for line in f"dist-sparse {command}: {why}".split("\n"):
        # An error may quote names from a model or a log: control characters are escaped.
        print("\n".join(wrapped(printable(line), indent="  ")), file=sys.stderr)
    return 1


def _show_progress(what: str) -> None:
    """On a terminal, print what is checked now, over the line of the last call; "" removes it."""
    if sys.stderr.isatty():
        text = f"checking {what} ..." if what else ""
        # Carriage return, then "erase to the end of the line".
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _silence_torchrec() -> None:
    """Silence the notices that TorchRec and FBGEMM print at every start.

    They concern their own internals, and a user of `dist-sparse` can do nothing about them. Errors,
    and warnings of other modules, are shown.
    """
    # Notices about optional accelerators, and about tracing.
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # TorchRec logs this one with the root logger, whose level is the user's.
    logging.getLogger().addFilter(
        lambda record: "LOCAL_WORLD_SIZE from environment" not in str(record.msg)
    )
    warnings.filterwarnings("ignore", module=r"(torchrec|fbgemm_gpu)(\.|$)")
    warnings.filterwarnings(
        "ignore", message=".* is deprecated. (Use|Please use) ", module=r"torch\.distributed"
    )
    warnings.filterwarnings(
        "ignore", message="fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel"
    )


# Subcommands: each takes the parsed options and returns the exit status.


def _inspect(options: argparse.Namespace) -> int:
    from dist_sparse.report.folder import RUN
    from dist_sparse.report.run import read_run
    from dist_sparse.report.summary import inspect_text, numbers

    folder = options.folder
    is_step = folder.name.startswith("step-") or any(folder.glob("step-*"))
    is_run = options.json or (folder / RUN).is_file()
    # Checkpoints have no JSON form.
    if is_step and not is_run:
        # Imported here: it needs torch, and runs are read without torch.
        from dist_sparse.checkpoint.checkpoints import summary

        return _print_text(summary(folder))
    run = read_run(folder)
    return _print_result(options, numbers(run), inspect_text(run))


def _report(options: argparse.Namespace) -> int:
    import webbrowser

    from dist_sparse.report.page import write_report
    from dist_sparse.report.run import read_run
    from dist_sparse.report.summary import numbers, summary

    run = read_run(*options.folders)
    # A name of its own: the comparison must not replace the report of its first run.
    default = run.folder / _COMPARISON if len(options.folders) > 1 else None
    page = write_report(run, options.out or default, svg=options.svg).resolve()
    status = _print_result(options, numbers(run), summary(run, page))
    # After the numbers, so that a machine without a browser prints them too.
    if options.open and not webbrowser.open(page.as_uri()):
        return _print_failure("report", f"no browser was found to open {page.as_uri()}")
    return status


def _plan(options: argparse.Namespace) -> int:
    from dist_sparse.planning.plan import plan

    _silence_torchrec()
    model, optimizer = model_and_optimizer(options.function)
    planned = plan(model, options.budget, rotate=options.rotate, optimizer=optimizer)
    return _print_result(options, planned.to_json(), str(planned))


def _frontier(options: argparse.Namespace) -> int:
    from dist_sparse.planning.frontier import BUDGETS, frontier

    _silence_torchrec()
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
    return _print_result(options, measured.to_json(), str(measured))


def _serve_check(options: argparse.Namespace) -> int:
    from dist_sparse.serving.chain import check_artifact
    from dist_sparse.serving.manifest import summary

    manifest = check_artifact(options.folder, *options.deltas).manifest
    return _print_result(options, json.loads(manifest.to_text()), f"{summary(manifest)}\nok")


def _merge(options: argparse.Namespace) -> int:
    from dist_sparse.serving.chain import merge
    from dist_sparse.serving.manifest import summary

    manifest = merge(options.folder, *options.deltas, out=options.out)
    return _print_text(f"{options.out}\n{summary(manifest)}")


def _doctor(options: argparse.Namespace) -> int:
    from dist_sparse.cli.doctor import examine

    diagnosis = examine(progress=_show_progress)
    _show_progress("")
    status = _print_result(options, diagnosis.to_json(), diagnosis.text(options.verbose))
    # The status of a failed print() is larger than 1 for a closed pipe, and wins.
    return max(status, bool(diagnosis.broken))


def _selftest(options: argparse.Namespace) -> int:
    # Before the import: TorchRec logs when it is imported.
    _silence_torchrec()
    from dist_sparse.selftest import as_text, selftest

    try:
        results = selftest(options.device, options.nproc, _show_progress)
    finally:
        _show_progress("")
    status = _print_result(options, results, as_text(results))
    # After the print: the results took minutes, and writing the file may fail.
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return max(status, not results["passed"])


_JSON = option("--json", help="prints JSON, sizes in bytes", action="store_true")
_FUNCTION = option(
    "function", help="package.module:function or file.py:function", metavar="FUNCTION"
)
_ROTATE = option(
    "--rotate",
    help="tables that only dot products between them read",
    type=lambda names: names.split(","),
    action="append",
    metavar="A,B",
)
_ARTIFACT = option(
    "folder", help="the folder that export wrote", type=existing_path, metavar="ARTIFACT"
)
_DELTAS = option(
    "deltas",
    help="deltas after it, in order",
    nargs="*",
    type=existing_path,
    # Without a default, argparse would list it among the arguments that are required.
    default=[],
    metavar="DELTA",
)

# Commands by name, in the order of --help: function, purpose, examples with notes, and options.
_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str, str, Sequence[Option]]] = {
    "inspect": (
        _inspect,
        "shows the tables and the config of a run, or a checkpoint",
        """\
  dist-sparse inspect runs/latest
  dist-sparse inspect saved/step-00001000

RUN is a folder that RunLog wrote, or one of Checkpoints: all steps are listed;
of one step, every byte is verified and each tensor is shown.
""",
        [
            option(
                "folder",
                help="the folder of the run, or of checkpoints",
                type=existing_path,
                metavar="RUN",
            ),
            _JSON,
        ],
    ),
    "report": (
        _report,
        "writes charts of runs as one HTML file",
        """\
  dist-sparse report runs/latest
  dist-sparse report runs/a runs/b runs/c --out comparison.html --svg charts

RUN is a folder that RunLog wrote; runs/latest is the one in runs that was
started last. The first RUN is compared with the others; one alone with the runs
in folders inside its own.
""",
        [
            option(
                "folders", help="the folder of a run", nargs="+", type=existing_path, metavar="RUN"
            ),
            option(
                "--out",
                help=f"the HTML file; default: RUN/report.html, of several runs {_COMPARISON} in"
                " the first",
                metavar="FILE",
            ),
            option("--open", help="opens the page in the browser", action="store_true"),
            option("--svg", help="writes each chart as SVG too, into this folder", metavar="DIR"),
            _JSON,
        ],
    ),
    "plan": (
        _plan,
        "shows what a budget of bytes can hold",
        """\
  dist-sparse plan my.package:model --budget 10% --rotate user,item
  dist-sparse plan model.py:trained --budget 512KiB

FUNCTION takes no arguments and returns a trained model, which is not changed,
or (model, optimizer), if the tables are not fused.
`dist-sparse frontier` measures what fits on the trained model.
""",
        [
            option(
                "--budget",
                help="bytes to serve, such as 10%% or 512MiB",
                type=parse_budget,
                metavar="SIZE",
                required=True,
            ),
            _FUNCTION,
            _ROTATE,
            _JSON,
        ],
    ),
    "frontier": (
        _frontier,
        "measures what a trained model is worth at a few sizes",
        """\
  dist-sparse frontier model.py:measured --out runs/frontier
  dist-sparse frontier my.package:measured --rotate user,item --budget 10%

FUNCTION returns (model, evaluate); evaluate(model) returns metrics by name, on
held-out data. If it has the parameter columns, it is called again with
fractions of them, for models with smaller tables.
""",
        [
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
                # METHODS of planning.frontier, which imports torch.
                choices=("bits", "untouched", "small", "rotated", "rows", "column", "codes"),
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
            _FUNCTION,
            _ROTATE,
            _JSON,
        ],
    ),
    "serve-check": (
        _serve_check,
        "verifies an artifact, and shows what its tables take",
        """\
  dist-sparse serve-check served/
  dist-sparse serve-check served/ monday/ tuesday/

Every byte is verified. Needs torch, no model.
""",
        [_ARTIFACT, _DELTAS, _JSON],
    ),
    "merge": (
        _merge,
        "writes an artifact and its deltas as one artifact",
        """\
  dist-sparse merge served/ monday/ tuesday/ --out base/

The new folder equals a full export at the last delta, byte for byte.
Needs torch, no model.
""",
        [
            _ARTIFACT,
            _DELTAS,
            option("--out", help="the new folder", metavar="DIR", required=True),
        ],
    ),
    "doctor": (
        _doctor,
        "checks whether this machine can train, and prints fixes",
        """\
  dist-sparse doctor
  dist-sparse doctor --verbose

Changes nothing.
""",
        [option("-v", "--verbose", help="shows every finding", action="store_true"), _JSON],
    ),
    "selftest": (
        _selftest,
        "trains on this machine's devices, and compares with the CPU",
        """\
  dist-sparse selftest
  dist-sparse selftest --device cuda --out selftest.json

Compares masks and weights of small models, and measures mask updates. Takes up
to ten minutes on GPUs, two on a CPU.
""",
        [
            option("--device", help="default: cuda where there is a GPU", choices=("cpu", "cuda")),
            option(
                "--nproc",
                help="processes; default: one a GPU, 2 on a CPU",
                type=int,
                choices=range(1, 17),
                metavar="N",
            ),
            option("--out", help="writes JSON for an issue", type=Path, metavar="FILE"),
            _JSON,
        ],
    ),
}
