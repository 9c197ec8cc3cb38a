"""The tutorial: what two ranks train is planned, published and served, and a delta changes it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchrec")
pytest.importorskip("dist_sparse.extras.report")

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from dist_sparse import export, load_served
from dlrm import movielens
from dlrm.batches import DataError, Dataset
from tests.warm import run_ranks_of, run_script
from tutorial import job, serve
from tutorial.ask import predict, request_of
from tutorial.layers import Layers, save_layers

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "tutorial"
PAGE = ROOT / "docs" / "tutorial.md"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
WORKERS, PATIENCE = 2, 120


@pytest.fixture(scope="module")
def data() -> Dataset:
    try:
        return movielens.load(movielens.fetch())
    except DataError as error:
        pytest.skip(f"OFFLINE, the tutorial is not tested: {error}")


def test_the_layers_equal_torchrecs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=9, embedding_dim=4, feature_names=[name])
        for name in "ab"
    ]
    dlrm = DLRM(EmbeddingBagCollection(tables), 3, [8, 4], [16, 8, 1])
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=torch.tensor([1, 0, 2, 1, 1, 1]))
    dense = torch.randn(3, 3)
    save_layers(dlrm, tmp_path / "layers.safetensors")
    # In a container, the server is another user.
    assert (tmp_path / "layers.safetensors").stat().st_mode & 0o777 == 0o644
    layers = Layers(tmp_path / "layers.safetensors")
    assert layers.dense_features == 3
    found = layers(dense, dlrm.sparse_arch(ids))
    torch.testing.assert_close(found, dlrm(dense, ids).squeeze(1))
    assert found.abs().min() > 0


def test_the_dockerfile_copies_what_exists() -> None:
    for words in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M):
        for source in words.split()[:-1]:
            assert (ROOT / source).exists(), source
    pins = (ROOT / "requirements" / "common.txt").read_text()
    pins += (ROOT / "requirements" / "cpu.txt").read_text()
    for pin in re.findall(r"\b[a-z]+==[\d.]+", DOCKERFILE):
        assert pin in pins.split(), pin


@pytest.mark.slow
def test_the_package_builds_from_what_the_dockerfile_copies(tmp_path: Path) -> None:
    """Without an index: the image has one, for setuptools alone."""
    source = tmp_path / "src"
    source.mkdir()
    before_app = DOCKERFILE.partition("WORKDIR /app")[0]
    for words in re.findall(r"^COPY (.+)$", before_app, re.M):
        *copied, to = words.split()
        for name in copied:
            if (ROOT / name).is_dir():
                skip = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, source / to, ignore=skip)
            else:
                shutil.copy(ROOT / name, source / to)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, *offline, str(source)], check=True, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert "dist_sparse/serving/served.py" in files.namelist()


class Running(NamedTuple):
    """A server as a container has it."""

    process: subprocess.Popen[bytes]
    address: str
    said: Callable[[str], None]

    def get(self, page: str) -> str:
        with urlopen(f"{self.address}/{page}") as response:
            return str(response.read().decode())

    def metrics(self) -> dict[str, int]:
        return {
            name.removeprefix("dist_sparse_"): int(number)
            for name, number in (line.rsplit(" ", 1) for line in self.get("metrics").splitlines())
        }


@contextmanager
def served(published: Path, folder: Path) -> Iterator[Running]:
    """Start the server from the files that the image has, by the command that it starts."""
    [copied] = re.findall(r"^COPY (.+) tutorial/$", DOCKERFILE, re.M)
    (folder / "tutorial").mkdir(parents=True)
    for file in copied.split():
        shutil.copy(ROOT / file, folder / "tutorial")
    [entry] = re.findall(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.M)
    words = [sys.executable, *json.loads(entry)[1:], "--port", "0"]
    words[words.index("/published")] = str(published)
    words[words.index("0.0.0.0")] = "127.0.0.1"
    # Importing TorchRec fails there.
    (folder / "torchrec.py").write_text("raise AssertionError('TorchRec is imported')\n")
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    log = folder / "log"
    with open(log, "w") as out:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out)

    def said(text: str) -> None:
        until = time.monotonic() + PATIENCE
        while len(re.findall(text, log.read_text())) < WORKERS:
            assert process.poll() is None and time.monotonic() < until, (text, log.read_text())
            time.sleep(0.05)

    try:
        said(r"worker \d: version \d, \d+ MiB")
        yield Running(process, re.findall(r"http://\S+", log.read_text())[0], said)
        process.terminate()
        assert process.wait(PATIENCE) in (0, -signal.SIGKILL)
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


def is_listening(address: str) -> bool:
    """Return whether any worker takes connections."""
    try:
        urlopen(f"{address}/health").close()
    except URLError as error:
        return not isinstance(error.reason, ConnectionRefusedError)
    except OSError:
        pass  # one worker ended while it answered
    return True


def torchrun(script: str, *words: object) -> str:
    """Run a script on two ranks, as the page does, and return what it prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(FOLDER / script), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def rows_of(text: str) -> dict[str, tuple[str, ...]]:
    """Return rows, rows never read and the share that reads zeros of each table in a printed plan.
    Which rows were hardly read may differ between machines."""
    count, share = r"([\d,]+|unknown)", r"([\d.]+%|unknown)"
    lines = re.findall(rf"^(\w+) +{count} +{count} +{count} +{share}$", text, re.M)
    return {name: (rows, never, zeros) for name, rows, never, _, zeros in lines}


def auc_in(text: str) -> float:
    """Return the AUC that a script printed."""
    return float(re.findall(r"^AUC .*?(0\.\d+)$", text, re.M)[0])


def expected(folders: list[Path], data: Dataset, index: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the logits of a chain of versions, and the counters of its tables."""
    tables = load_served(folders, count=True)
    batch = data.batch(index)
    ids = batch.sparse_features
    embedded = tables(ids.values(), ids.lengths()).view(len(index), len(ids.keys()), -1)
    layers = Layers(folders[-1].with_name("layers.safetensors"))
    return layers(batch.dense_features, embedded), tables.metrics()


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.network
def test_from_training_to_a_server_with_a_delta(data: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    published = folder / "published"
    trained = torchrun("train.py", folder)
    assert "Trained on ratings 0 to 70,000, in order of time: 350 steps in all." in trained
    printed, silent = run_ranks_of(FOLDER / "publish.py", [folder], world=2, cwd=tmp_path)
    assert printed.returncode == silent.returncode == 0, printed.stderr[-4000:]
    assert not silent.stdout
    planned = rows_of(printed.stdout)
    assert len(planned) == len(data.sparse) and planned == rows_of(PAGE.read_text())

    versions = [published / "000" / "tables", published / "001" / "tables"]
    index = data.test[-64:]
    request = request_of(data, index)
    with served(published, tmp_path / "app") as server:
        before, counted = expected(versions[:1], data, index)
        answers = [predict(server.address, request) for _ in range(40)]
        for answer in answers:
            assert answer["version"] == 0
            torch.testing.assert_close(torch.tensor(answer["logits"]), before)
        # Each answer is counted before the client has it.
        metrics = server.metrics()
        for name in ("lookups_total", "removed_lookups_total", "unknown_lookups_total"):
            for table, count in counted[name].items():
                assert metrics[f'{name}{{table="{table}"}}'] == 40 * count, (name, table)
        assert counted["removed_lookups_total"]["user_x_genre"] > 0
        both = {json.loads(server.get("health"))["worker"] for _ in range(40)}
        assert both == {0, 1}

        # Ids that are new, and requests that do not fit.
        unknown = {**request, "ids": {**request["ids"], "user_id": [[10**6]] * 64}}
        predict(server.address, unknown)
        assert server.metrics()['unknown_lookups_total{table="user_id"}'] == 64
        fractions = {**request["ids"], "user_id": [[1.7]] * 64}
        for wrong in (
            {},
            {**request, "dense": [[1.0]]},
            {"dense": request["dense"], "ids": {}},
            {"dense": request["dense"], "ids": []},
            {**request, "ids": fractions},
        ):
            with pytest.raises(HTTPError) as refused:
                predict(server.address, wrong)
            assert refused.value.code == 400

        # Loaded once: what the workers do not share is little beside what torch takes.
        for worker in range(WORKERS):
            assert 0 < server.metrics()[f'own_memory_bytes{{worker="{worker}"}}'] < 100 << 20

        # The next version: published by one rank, which has the same checkpoint.
        more = run_ranks_of(
            FOLDER / "train.py", [folder, "--ratings", "80000"], world=2, cwd=tmp_path
        )
        assert more[0].returncode == 0, more[0].stderr[-4000:]
        assert "ratings 70,000 to 80,000" in more[0].stdout
        alone = run_script(FOLDER / "publish.py", [folder], cwd=tmp_path)
        assert alone.returncode == 0, alone.stderr[-4000:]
        server.said(r"worker \d: version 1, applied in")
        after, _ = expected(versions, data, index)
        assert not torch.equal(before, after)
        for _ in range(10):
            answer = predict(server.address, request)
            assert answer["version"] == 1
            torch.testing.assert_close(torch.tensor(answer["logits"]), after)

        # The client gets as good answers as the trained model gives.
        asked = run_script(FOLDER / "ask.py", [server.address], cwd=tmp_path)
        assert "99 requests of 200 examples: 99 by version 1\n" in asked.stdout, asked.stderr
        assert auc_in(asked.stdout) == pytest.approx(auc_in(more[0].stdout), abs=0.003)

        # A damaged version is refused, and the last one stays.
        shutil.copytree(published / "001", tmp_path / "002")
        with open(tmp_path / "002" / "tables" / "manifest.json", "ab") as file:
            file.write(b" ")
        (tmp_path / "002").rename(published / "002")
        server.said(r"worker \d: stays at version 1: ")
        assert predict(server.address, request)["version"] == 1
        until = time.monotonic() + PATIENCE
        while server.metrics()['refused{worker="0"}'] != 1:
            assert time.monotonic() < until

    # Started again, it serves the versions before the damaged one. If it is killed, no worker stays
    # behind.
    with served(published, tmp_path / "again") as server:
        assert predict(server.address, request)["version"] == 1
        server.process.kill()
        until = time.monotonic() + PATIENCE
        while is_listening(server.address):
            assert time.monotonic() < until


@pytest.mark.slow
def test_workers_share_a_table_until_a_delta_writes_to_it(tmp_path: Path) -> None:
    """A table of 256 MB: of its pages, a worker has those alone that its delta has written."""
    rows, dim = 1_000_000, 64
    tables = [
        EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
    ]
    dlrm = DLRM(EmbeddingBagCollection(tables), 3, [dim], [16, 1])
    published = tmp_path / "published"

    def publish(version: str, **since: Any) -> None:
        folder = published / version
        folder.mkdir(parents=True)
        save_layers(dlrm, folder / "layers.safetensors")
        export(dlrm, None, folder / "tables", **since)

    publish("000")
    with served(published, tmp_path / "app") as server:

        def own(worker: int) -> float:
            return server.metrics()[f'own_memory_bytes{{worker="{worker}"}}'] / 2**20

        # They would share the port with the workers of another server.
        port = server.address.rpartition(":")[2]
        twice = run_script(Path(serve.__file__), [published, "--port", port], cwd=tmp_path)
        assert twice.returncode == 1 and "Pass another --port." in twice.stderr
        with pytest.raises(HTTPError) as elsewhere:
            predict(f"{server.address}/v1", {})
        assert elsewhere.value.code == 404

        before = [own(worker) for worker in range(WORKERS)]
        assert max(before) < 20, before
        with torch.no_grad():
            [weight] = dlrm.sparse_arch.parameters()
            weight[::100] += 1
        publish("001", since=published / "000" / "tables")
        server.said(r"worker \d: version 1, applied in")
        after = [own(worker) for worker in range(WORKERS)]
        assert min(after) > 30 and max(after) < 80, after


def publish_small(folder: Path) -> None:
    """Publish a DLRM of one small table as a first version."""
    tables = [EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])]
    dlrm = DLRM(EmbeddingBagCollection(tables), 3, [4], [16, 1])
    folder.mkdir(parents=True)
    save_layers(dlrm, folder / "layers.safetensors")
    export(dlrm, None, folder / "tables")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["layers.safetensors", "tables/tables.safetensors"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_damaged_first_version_is_refused(tmp_path: Path, file: str, is_missing: bool) -> None:
    """In a line that names the file: there is no version before it."""
    publish_small(tmp_path / "000")
    bad = tmp_path / "000" / file
    bad.unlink() if is_missing else bad.write_bytes(b"x")
    done = run_script(Path(serve.__file__), [tmp_path, "--port", "0"], cwd=tmp_path)
    assert done.returncode == 1
    assert str(bad) in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.slow
def test_signals_that_end_the_server_twice(tmp_path: Path) -> None:
    """As of an impatient user, or of `timeout`, which signals the group too."""
    publish_small(tmp_path / "published" / "000")
    with served(tmp_path / "published", tmp_path / "app") as server:
        until = time.monotonic() + PATIENCE
        while server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
            assert time.monotonic() < until
            time.sleep(0.001)


@pytest.mark.slow
def test_a_folder_without_a_version_is_refused(tmp_path: Path) -> None:
    done = run_script(Path(serve.__file__), [tmp_path], cwd=tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr == f"{tmp_path} holds no version: run publish.py, and pass FOLDER/published.\n"
    )
    # The client, without a server.
    asked = run_script(FOLDER / "ask.py", ["127.0.0.1:9/"], cwd=tmp_path)
    assert asked.returncode == 1
    assert re.match(
        r"http://127.0.0.1:9 does not answer: .* Start serve.py first.\n$", asked.stderr
    )
    assert job.TESTED % job.BATCH_SIZE == 0
