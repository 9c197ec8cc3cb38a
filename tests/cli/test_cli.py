"""Command `dist-sparse`: help, subcommands, arguments, and failures in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dist_sparse import RunLog
from dist_sparse.checkpoint.storage import MARKER
from dist_sparse.cli import doctor
from dist_sparse.cli.doctor import Diagnosis
from dist_sparse.cli.main import main, parser
from dist_sparse.planning.frontier import METHODS
from dist_sparse.report.folder import RUN
from tests.report.test_run_log import train

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert all(
        f"\n    {name}" in out for name in ("launch", "inspect", "plan", "serve-check", "doctor")
    )
    assert "examples:" in out and "exit status: 0" in out
    purpose = "Plans what embedding tables can lose; launches, reports on and checks training."
    assert out.split("\n")[2] == purpose


def test_methods_are_those_of_frontier() -> None:
    """The command line lists them without importing torch."""
    [subparsers] = [action for action in parser()._actions if action.dest == "command"]
    assert subparsers.choices is not None
    frontier = dict(subparsers.choices)["frontier"]
    [method] = [action for action in frontier._actions if action.dest == "method"]
    assert method.choices == tuple(METHODS)


@pytest.mark.parametrize("words", [[], ["help"]])
def test_alone_it_prints_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: dist-sparse") and "examples:" in said.out and not said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["inspec", "runs/latest"],
            "dist-sparse: error: argument COMMAND: invalid choice: 'inspec'",
        ),
        (["reprot"], "; did you mean report?"),
        (
            ["frontier", "no.py:f", "--tolerance", "x"],
            "argument --tolerance: Invalid 'x': must be a number such as 0.002, at least 0.",
        ),
        (["frontier", "no.py:f", "--tolerance=-1"], "argument --tolerance: Invalid '-1'"),
        (["frontier", "no.py:f", "--method", "rotatd"], "; did you mean rotated?"),
        (
            ["plan", "no.py:f", "--budget", "3%", "--rotat", "a"],
            "plan: error: unrecognized arguments: --rotat",
        ),
        (
            ["report", ".", "--opne"],
            "report: error: unrecognized arguments: --opne; did you mean --open?",
        ),
        (
            ["report", ".", "--bogus"],
            "dist-sparse report: error: unrecognized arguments: --bogus\n",
        ),
        (["merge"], "the following arguments are required: ARTIFACT, --out\n"),
        (
            ["selftest", "--nproc", "99"],
            "argument --nproc: invalid choice: 99 (choose from 1, 2, 3",
        ),
        (["inspect", "nothere"], "inspect: error: argument RUN: 'nothere' does not exist."),
        (["inspect", "step-00000001"], "argument RUN: 'step-00000001' does not exist."),
        (["report", ".", "nothere"], "argument RUN: 'nothere' does not exist."),
        (["serve-check", "nothere"], "argument ARTIFACT: 'nothere' does not exist."),
        (["serve-check", ".", "nothere"], "argument DELTA: 'nothere' does not exist."),
        (["merge", "nothere", "--out", "x"], "argument ARTIFACT: 'nothere' does not exist."),
        (["launch", "nothere"], "error: Invalid SCRIPT='nothere': there is no such file."),
        (["report", ".", "--zzz"], "dist-sparse report: error: unrecognized arguments: --zzz\n"),
        (["launch", "--nprocs=2", "a.py"], "arguments: --nprocs=2; did you mean --nproc?"),
        (["plan", "f.py:f", "--budget", "80"], "No table fits in 80 bytes. Did you mean 80%?"),
        (
            ["launch", "sbatch"],
            "launch sbatch: error: the following arguments are required: SCRIPT",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err.replace("\n  ", " ")


def test_an_option_with_a_short_form_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse's usage shows the short form alone."""
    monkeypatch.setattr(doctor, "examine", lambda progress: Diagnosis((), "the CPU"))
    assert main(["doctor", "--verbose"]) == main(["doctor", "-v"]) == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"dist-sparse {project['version']}\n"


@pytest.mark.parametrize(
    "name",
    ["inspect", "report", "plan", "frontier", "serve-check", "doctor", "selftest", "launch"],
)
def test_each_has_a_help_of_its_own(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert (
        f"usage: dist-sparse {name}" in out and f"  dist-sparse {name}" in out.split("example")[1]
    )
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert name == "launch" or "exit status: 0" in out
    assert name == "launch" or "--json" in out


WRONG = [
    ["no-such-command"],
    ["--no-such-option"],
    ["inspect"],
    ["doctor", "more"],
    ["plan", "file.py:function"],
    ["plan", "file.py:function", "--budget", "5 apples"],
    ["plan", "file.py:function", "--budget", "101%"],
    ["plan", "file.py:function", "--budget", "9" * 400 + "TiB"],
    ["selftest", "--nproc", "0"],
    ["plan", "file.py:function", "--budget", "1%", "--metric", "auc"],
]


@pytest.mark.parametrize("words", WRONG, ids=str)
def test_a_wrong_command_line_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert capsys.readouterr().err.endswith(" --help\n")


def test_words_of_launch_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Options included."""
    assert main(["launch", "--print", "--nproc", "2", "train.py", "--", "-h", "--", "--print"]) == 0
    assert capsys.readouterr().out.endswith("-- train.py -h -- --print\n")
    with pytest.raises(SystemExit) as leaving:
        main(["launch", "--help"])
    assert leaving.value.code == 0
    assert "dist-sparse launch --nproc 2" in capsys.readouterr().out


MODEL = """
import torch
from torch import nn

def two():
    torch.manual_seed(0)
    return nn.ModuleDict({"user": nn.EmbeddingBag(100, 8), "item": nn.Embedding(50, 8)})

def evaluated():
    return two(), lambda model: {"auc": 0.5}

def failing():
    def evaluate(model):
        return {"auc": 1 / 0}
    return two(), evaluate

def driving():
    return nn.ModuleDict({"a\\x1b[2J": nn.EmbeddingBag(4, 4)})

def three_things():
    return 1, 2, 3

def broken():
    return helper()

def helper():
    raise ValueError("of the user's own\\nwith more lines")

def parsing():
    raise SystemExit(2)

def an_int():
    return 3, None

def needing(data, seed=0):
    return two()

number = 3
"""


def sentences(printed: str) -> list[str]:
    """Return the sentences of an output whose lines are wrapped."""
    return printed.replace("\n  ", " ").splitlines()


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "model_of_test_cli.py"
    file.write_text(MODEL)
    return str(file)


def test_plan_of_a_budget(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{model}:two", "--budget", "40%"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("budget 1.88 KiB, 40.0% of 4.69 KiB in 2 tables") and out.endswith(
        '1. all columns, int8:\nexport(model, None, "served", dtype="int8")\n'
    )
    words = ["--budget", "1 KiB", "--rotate", "user,item", "--json"]
    assert main(["plan", f"{model}:two", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["budget"] == 1024 and said["recommended"][0]["candidate"]["groups"] == [
        ["user", "item"]
    ]


ADAGRAD = """
import torch

def trained():
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8))
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.arange(30).view(3, 10)).sum().backward()
    optimizer.step()
    return model, optimizer
"""


def test_plan_knows_the_untouched_rows_of_a_plain_adagrad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(ADAGRAD)
    assert main(["plan", f"{tmp_path}/model.py:trained", "--budget", "50%"]) == 0
    assert "\n0       100          70            0\n" in capsys.readouterr().out


def test_plan_of_a_module(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(Path(model).parent)
    assert main(["plan", "model_of_test_cli:evaluated", "--budget", "50%"]) == 0
    assert "of 4.69 KiB in 2 tables" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "{model}"], "holds no run: there is no run.json"),
        (["serve-check", "{model}"], "serve-check: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_failure_is_one_sentence_and_1(
    words: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_failure(words, message, model, capsys, status=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["plan", "{model}:two", "--budget", "1%", "--rotate", "x,y"],
            "Invalid --rotate=[['x', 'y']]: ['x', 'y'] are none of the tables",
        ),
        (
            ["plan", "{model}:driving", "--budget", "1%", "--rotate", "x"],
            "of the tables ['a\\x1b[2J']",
        ),
        (["merge", "{model}", "{model}", "--out", "{model}"], "merge: Invalid --out='"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_one_sentence_and_2(
    words: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_failure(words, message, model, capsys, status=2)


def check_failure(
    words: list[str],
    message: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    *,
    status: int,
) -> None:
    assert main([word.replace("{model}", model) for word in words]) == status
    said = capsys.readouterr()
    assert said.out == ""
    [line] = sentences(said.err)
    assert line.startswith(f"dist-sparse {words[0]}: ") and message in line


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("{model}:three", "has no function 'three'."),
        ("{model}:number", "has no function 'number'."),
        (
            "{model}:three_things",
            "returned tuple; must return a torch.nn.Module, or (model, optimizer).",
        ),
        ("{model}:an_int", "returned tuple; must return a torch.nn.Module, or (model, optimizer)."),
        ("{model}:needing", "missing a required argument: 'data'; must take no arguments."),
        (
            "{model}:broken",
            "it failed at model_of_test_cli.py:27 with ValueError: of the user's own",
        ),
        ("{model}:parsing", "it failed at model_of_test_cli.py:30 with SystemExit: 2"),
        (
            "{model}x.py:one",
            "it failed with FileNotFoundError: [Errno 2] No such file or directory: ",
        ),
        (
            "no_such_module.at_all:one",
            "it failed with ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("one", "must be package.module:function or file.py:function."),
        ("json:dumps", "missing a required argument: 'obj'; must take no arguments."),
        ("json:JSONEncoder", "returned JSONEncoder; must return "),
        ("{folder}/typo.py:one", "it failed with SyntaxError: "),
        (
            "{folder}/fails.py:one",
            "it failed at fails.py:2 with ZeroDivisionError: division by zero",
        ),
    ],
)
@pytest.mark.parametrize("command", ["plan", "frontier"])
def test_a_wrong_function_is_two_sentences_and_2(
    command: str,
    function: str,
    message: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(model).parent
    (folder / "typo.py").write_text("def one(:")
    (folder / "fails.py").write_text("import json\nnumber = 1 / 0\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    function = function.replace("{model}", model).replace("{folder}", str(folder))
    assert main([command, function, *(["--budget", "10%"] if command == "plan" else [])]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    first, second = sentences(said.err)
    assert first.startswith(f"dist-sparse {command}: Invalid FUNCTION={function!r}: ")
    if command == "frontier" and "return" in message:
        message = "must return (model, evaluate), where evaluate is a function."
    assert message in first
    assert second == f"Usage and options: dist-sparse {command} --help"


def test_an_evaluate_that_fails_is_two_sentences_and_2(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(model).parent)
    assert main(["frontier", f"{model}:failing", "--budget", "10%"]) == 2
    first, second = sentences(capsys.readouterr().err)
    place = "it failed at model_of_test_cli.py:14 with ZeroDivisionError: division by zero"
    assert first == f"dist-sparse frontier: Invalid FUNCTION='{model}:failing': {place}"
    assert second == "Usage and options: dist-sparse frontier --help"


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path, config={"lr": 0.1}) as log:
        log.step(0, loss=2.0)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "last: loss 2" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == {"lr": 0.1}
    (tmp_path / RUN).write_text('{"format": 99}')
    assert main(["inspect", str(tmp_path)]) == 1
    [line] = sentences(capsys.readouterr().err)
    assert "has format 99; this release reads and writes 3" in line


def test_runs_are_read_without_torch(tmp_path: Path) -> None:
    """In a process in which it can't be imported; what is printed is the same."""
    train(tmp_path / "run")
    (tmp_path / "saved" / "step-00000001").mkdir(parents=True)
    (tmp_path / "saved" / "step-00000001" / MARKER).touch()
    code = (
        "import sys; sys.modules['torch'] = None; from dist_sparse.cli.main import main\n"
        "print([main(line.split()) for line in sys.stdin])"
    )
    lines = [
        "inspect run",
        "inspect run --json",
        "report run",
        "report run run --svg charts",
        "inspect saved",
    ]
    lines += ["serve-check run", "frontier model.py:f"]
    done = run_code(code, tmp_path, "\n".join(lines))
    assert done.stdout.endswith("[0, 0, 0, 0, 1, 1, 1]\n"), done.stderr
    assert "float32" in done.stdout and (tmp_path / "run" / "comparison.html").exists()
    assert run_code(
        code.replace("sys.modules['torch'] = None; ", ""), tmp_path, lines[0]
    ).stdout in (done.stdout.partition("{")[0] + "[0]\n")
    first, *others = sentences(done.stderr)
    assert first.startswith("dist-sparse inspect: ")
    why = "needs torch, which is not installed; dist-sparse doctor prints how to install it."
    assert others == [f"dist-sparse {command}: {why}" for command in ("serve-check", "frontier")]


@pytest.mark.slow
def test_torchrecs_notices_are_kept_out_of_a_plan(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    (tmp_path / "model.py").write_text(SHARDED)
    code = "from dist_sparse.cli.main import main; main(input().split())"
    done = run_code(code, tmp_path, "plan model.py:sharded --budget 50%")
    assert "in 1 table" in done.stdout and done.stderr == "WARNING:mine:mine\n"


SHARDED = """
import logging, torch, torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

def sharded():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    item = EmbeddingBagConfig(name="item", num_embeddings=1000, embedding_dim=16, feature_names=["item_id"])
    model = DistributedModelParallel(EmbeddingBagCollection(tables=[item]), device=torch.device("cpu"))
    model(KeyedJaggedTensor(["item_id"], torch.arange(64), lengths=torch.ones(64, dtype=torch.int64))).values()
    logging.getLogger("mine").warning("mine")
    return model, None
"""


def run_code(code: str, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_doctor_as_a_module(tmp_path: Path) -> None:
    """In a process of its own, in another folder, of which nothing is imported. A real process
    group starts on a missing network interface; the exit status matches the text."""
    (tmp_path / "json.py").write_text("raise ImportError('not the real one')")
    words = [sys.executable, "-m", "dist_sparse", "doctor", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "none0"}
    done = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    said = json.loads(done.stdout)
    gloo = next(each for each in said["findings"] if each["what"] == "gloo")
    assert not gloo["ok"] and not said["can_train"]
    assert "none0" in gloo["says"] and gloo["fix"] == "export GLOO_SOCKET_IFNAME=lo"
    assert done.returncode == 1, done.stderr


def test_completion_finds_the_commands() -> None:
    """shtab imports the parser, and reads its subcommands."""
    choices = [action.choices for action in parser()._actions if action.metavar == "COMMAND"]
    assert [*choices[0]] == [
        "launch",
        "inspect",
        "report",
        "plan",
        "frontier",
        "serve-check",
        "merge",
        "doctor",
        "selftest",
    ]
