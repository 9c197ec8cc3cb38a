"""Command `dist-sparse`: help, subcommands, arguments, and failures in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from dist_sparse import count_lookups
from dist_sparse.cli import doctor
from dist_sparse.cli.doctor import Diagnosis
from dist_sparse.cli.main import main, parser
from dist_sparse.launch.__main__ import Parser

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name}" in out for name in ("launch", "plan", "serve-check", "doctor"))
    assert "examples:" in out and "exit status: 0" in out
    purpose = "Plans what embedding tables can lose; launches, reports on and checks training."
    assert out.split("\n")[2] == purpose


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: dist-sparse") and "examples:" in said.out and not said.err


def test_alone_it_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With the help as its error: a script whose COMMAND is empty must not succeed."""
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("usage: dist-sparse") and "examples:" in said.err and not said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["pan", "model.py:f"],
            "dist-sparse: error: argument COMMAND: invalid choice: 'pan'",
        ),
        (["docotr"], "; did you mean doctor?"),
        (
            ["plan", "no:f", "--budget", "3%", "--rotat", "a"],
            "plan: error: unrecognized arguments: --rotat",
        ),
        (
            ["doctor", "--versobe"],
            "doctor: error: unrecognized arguments: --versobe; did you mean --verbose?",
        ),
        (
            ["doctor", "--bogus"],
            "dist-sparse doctor: error: unrecognized arguments: --bogus\n",
        ),
        (["merge"], "the following arguments are required: ARTIFACT, --out\n"),
        (
            ["selftest", "--nproc", "99"],
            "argument --nproc: invalid choice: 99 (choose from 1, 2, 3",
        ),
        (["serve-check", "nothere"], "argument ARTIFACT: 'nothere' does not exist."),
        (["serve-check", ".", "nothere"], "argument DELTA: 'nothere' does not exist."),
        (["merge", "nothere", "--out", "x"], "argument ARTIFACT: 'nothere' does not exist."),
        (["launch", "nothere"], "error: Invalid SCRIPT='nothere': there is no such file."),
        (["launch", "--nprocs=2", "a.py"], "arguments: --nprocs=2; did you mean --nproc?"),
        (["plan", "f:f", "--budget", "80"], "No table fits in 80 bytes. Did you mean 80%?"),
        (
            ["plan", "f:f", "--budget", "-5%"],
            "argument --budget: Invalid budget='-5%': must be bytes (an int >= 0), a fraction",
        ),
        (["plan", "f:f", "--budget"], "argument --budget: expected one argument\n"),
        (["plan", "f:f"], "plan: error: the following arguments are required: --budget\n"),
        (["plan", "f.py:f"], "argument FUNCTION: there is no file 'f.py'."),
        (
            ["plan", "f.py"],
            "argument FUNCTION: 'f.py' must be package.module:function or file.py:function.",
        ),
        (["plan", "f:f", "--batches", "f.py:f"], "argument --batches: there is no file 'f.py'."),
        (["frontier", "f.py:f"], "frontier: error: argument FUNCTION: there is no file 'f.py'."),
        (["--budget", "5%", "plan", "f:f"], "error: unrecognized arguments: --budget\n"),
        (
            ["plan", "f:f", "--budgt", "5%"],
            "plan: error: unrecognized arguments: --budgt; did you mean --budget?",
        ),
        (["plan", "f:f", "5%"], "unrecognized arguments: 5%; did you mean --budget 5%?"),
        (["plan", "f:f", "--budget", "3%", "5%"], "unrecognized arguments: 5%\n"),
        (["merge", "--oot=x"], "unrecognized arguments: --oot=x; did you mean --out?"),
        (["--vresion"], "unrecognized arguments: --vresion; did you mean --version?"),
        (["launch", "--nprocs", "2"], "arguments: --nprocs; did you mean --nproc?"),
        (
            ["launch", "torchrun"],
            "launch torchrun: error: the following arguments are required: SCRIPT",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_wrong(words, message, capsys)


def check_wrong(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    ["plan", "serve-check", "doctor", "selftest", "launch"],
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
    assert "[--budget" not in out  # brackets are for what may be left out
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert name == "launch" or "exit status: 0" in out
    assert name == "launch" or "--json" in out


WRONG = [
    ["no-such-command"],
    ["--no-such-option"],
    ["serve-check"],
    ["doctor", "more"],
    ["plan", "file:function"],
    ["plan", "file:function", "--budget", "5 apples"],
    ["plan", "file:function", "--budget", "101%"],
    ["plan", "file:function", "--budget", "9" * 400 + "TiB"],
    ["selftest", "--nproc", "0"],
    ["plan", "file:function", "--budget", "1%", "--metric", "auc"],
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
        '1. all columns, int8:\nds.export(model, None, "served", dtype="int8")\n'
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

def later():
    for first in (0, 25):
        yield {"0": torch.arange(first, first + 10)}

def wrong():
    return 3

def failing():
    raise KeyError("no such day")

def ending():
    yield from later()
    raise KeyError("no third day")

def single():
    return {"0": torch.arange(10)}
"""


def test_plan_knows_the_untouched_rows_of_a_plain_adagrad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(ADAGRAD)
    assert main(["plan", f"{tmp_path}/model.py:trained", "--budget", "50%"]) == 0
    assert "\n0       100          70            0\n" in capsys.readouterr().out


def test_plan_of_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lookups that were counted and saved, where the function returns no optimizer."""
    file = tmp_path / "model.py"
    file.write_text(f"{ADAGRAD}\ndef bare():\n    return trained()[0]\n")
    model = nn.Sequential(nn.EmbeddingBag(100, 8))
    count_lookups([{"0": torch.arange(30)}], model).save(tmp_path / "counts")
    words = ["plan", f"{file}:bare", "--budget", "50%", "--record", f"{tmp_path}/counts"]
    assert main(words) == 0
    # Counts don't tell which rows were hardly read.
    assert re.search(r"\n0 +100 +70 +unknown\n", capsys.readouterr().out)


def test_plan_of_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The share of their lookups that would read zeros; a function that returns none is refused,
    with 1 if it raises and 2 if it is not one."""
    file = tmp_path / "model.py"
    file.write_text(ADAGRAD)
    words = ["plan", f"{file}:trained", "--budget", "50%"]
    assert main([*words, "--batches", f"{file}:later"]) == 0
    out = capsys.readouterr().out
    assert "\n0       100          70            0        25.0%\n" in out
    assert "\n5 of 20 examples (25.0%) would read zeros.\n" in out
    for name, status, message in (
        ("wrong", 2, "returned int; must return batches."),
        ("failing", 1, f"it failed at {os.path.relpath(file)}:19 with KeyError: 'no such day'"),
        ("ending", 1, f"it failed at {os.path.relpath(file)}:23 with KeyError: 'no third day'"),
        ("absent", 2, f"{file} has no function 'absent'."),
    ):
        assert main([*words, "--batches", f"{file}:{name}"]) == status
        said = " ".join(capsys.readouterr().err.split())
        assert f"Invalid --batches='{file}:{name}': " in said and message in said
    assert main([*words, "--batches", f"{file}:single"]) == 1
    assert "batches of type dict: must be several: pass [batch]." in capsys.readouterr().err


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
        (["serve-check", "{model}"], "serve-check: "),
        (
            ["plan", "{model}:two", "--budget", "1%", "--rotate", "x,y"],
            "Invalid --rotate=[['x', 'y']]: ['x', 'y'] are not among the tables",
        ),
        (
            ["plan", "{model}:driving", "--budget", "1%", "--rotate", "x"],
            "among the tables ['a\\x1b[2J']",
        ),
        (["merge", "{model}", "{model}", "--out", "{model}"], "merge: Invalid --out='"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_failure_is_one_sentence_and_1(
    words: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("{model}", model) for word in words]) == 1
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
        ("{model}:brokne", "has no function 'brokne'; did you mean broken?"),
        (
            "no_such_module.at_all:one",
            "it failed with ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("json:dumps", "missing a required argument: 'obj'; must take no arguments."),
        ("json:JSONEncoder", "returned JSONEncoder; must return "),
        ("{folder}/typo.py:one", "it failed with SyntaxError: "),
        (
            "{folder}/fails.py:one",
            "it failed at fails.py:2 with ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_wrong_function_is_named(
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
    # What a function raises is no mistake in the command line.
    status = 1 if function.endswith((":broken", ":parsing")) else 2
    function = function.replace("{model}", model).replace("{folder}", str(folder))
    check_wrong_function(["plan", function, "--budget", "10%"], message, status, capsys)


def test_a_function_may_remove_the_working_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the line that failed has its whole path then."""
    file, work = tmp_path / "gone.py", tmp_path / "work"
    file.write_text(f"import os\ndef one():\n    os.rmdir({str(work)!r})\n    return 1 / 0\n")
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", [*sys.path])
    message = f"it failed at {file}:4 with ZeroDivisionError: division by zero"
    check_wrong_function(["plan", f"{file}:one", "--budget", "10%"], message, 1, capsys)


def check_wrong_function(
    words: list[str], message: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command, function = words[:2]
    assert main(words) == status
    said = capsys.readouterr()
    assert said.out == ""
    first, *others = sentences(said.err)
    invalid = "Invalid " if status == 2 else ""
    assert first.startswith(f"dist-sparse {command}: {invalid}FUNCTION={function!r}: ")
    assert message in first
    # Options are no help against what the function raises.
    usage = [f"Usage and options: dist-sparse {command} --help"] if status == 2 else []
    assert others == usage


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


def test_a_parser_reads_the_words_of_the_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tools call it. Its help shows which options are required, also after it has refused a
    word."""
    words = Parser(prog="it")
    words.add_argument("--budget", required=True)
    monkeypatch.setattr(sys, "argv", ["it", "--help"])
    with pytest.raises(SystemExit) as leaving:
        words.parse_args()
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith("usage: it [-h] --budget BUDGET\n")
    for given, message in ((["--bogus"], "unrecognized arguments"), ([], "are required: --budget")):
        with pytest.raises(SystemExit):
            words.parse_args(given)
        assert message in capsys.readouterr().err


def test_completion_finds_the_commands() -> None:
    """shtab imports the parser, and reads its subcommands."""
    choices = [action.choices for action in parser()._actions if action.metavar == "COMMAND"]
    # Without those of extras, which come in between.
    core = ["doctor", "plan", "launch", "serve-check", "merge"]
    assert [name for name in choices[0] if name in core] == core
