"""The artifact's folder: whole or absent, verified before a tensor is returned, refused by name
when damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_sparse.serving.artifact import ArtifactWriter, Opened, open_artifact
from dist_sparse.serving.manifest import Collection, Feature, Manifest, Table
from tests.serving.stored import put

INT8: dict[str, Any] = {"dim": 3, "pooling": "sum", "dtype": "int8", "before": 1}
# Sizes that leave everything after them misaligned, were it not sorted; one name needs escapes in
# JSON.
TABLES = {
    "dense": Table(rows=3, kept=3, **INT8),
    "nothing left": Table(rows=5, kept=0, **INT8),
    'pac"ké': Table(rows=33, kept=1, **INT8),
}
TENSORS = {
    "dense.scale_bias": torch.arange(6.0).half().view(3, 2),
    "dense.rows": torch.arange(9, dtype=torch.uint8).view(3, 3),
    "nothing left.kept": torch.zeros(1, dtype=torch.int32),
    "nothing left.scale_bias": torch.zeros(0, 2).half(),
    "nothing left.rows": torch.zeros(0, 3, dtype=torch.uint8),
    'pac"ké.kept': torch.tensor([0, 1], dtype=torch.int32),
    'pac"ké.scale_bias': torch.ones(1, 2).half(),
    'pac"ké.rows': torch.tensor([[7, 9, 0]], dtype=torch.uint8),
}
MANIFEST = Manifest(
    dist_sparse="1.0",
    dtype="int8",
    collections=(
        Collection(
            path="sparse.tables",
            kind="bag",
            tables=tuple(TABLES),
            features=(Feature(name="f", table="dense"), Feature(name="f", table="nothing left")),
        ),
    ),
    tables=TABLES,
    bytes=0,
)


def write(
    path: Path, tensors: dict[str, Tensor] = TENSORS, manifest: Manifest = MANIFEST
) -> Manifest:
    with ArtifactWriter(path) as writer:
        writer.begin(manifest.tables)
        for table, entry in manifest.tables.items():
            found = {key: tensors[f"{table}.{key}"] for key in entry.layout()}
            put(writer, table, entry, found)
        sealed = writer.seal(manifest)
        assert (
            Opened(writer.folder, sealed).verify().manifest == sealed
        )  # readable before it has its name
        with pytest.raises(ValueError, match="unfinished export"):
            open_artifact(writer.folder)
        writer.publish(sealed)
    return sealed


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifacts") / "artifact"
    write(path)
    return path


@pytest.fixture
def copied(artifact: Path, tmp_path: Path) -> Path:
    shutil.copytree(artifact, tmp_path / "artifact")
    return tmp_path / "artifact"


def test_what_is_written_is_read(artifact: Path, tmp_path: Path) -> None:
    opened = open_artifact(artifact)
    assert [file.name for file in artifact.parent.iterdir()] == ["artifact"]
    assert opened.manifest.collections == MANIFEST.collections
    assert opened.manifest.collections[0].outputs == ("f@dense", "f@nothing left")
    assert opened.manifest.bytes == (artifact / "tables.safetensors").stat().st_size
    for table in TABLES:
        for name, tensor in opened.tensors(table).items():
            expected = TENSORS[f"{table}.{name}"]
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
            assert tensor.data_ptr() % tensor.element_size() == 0
    assert write(tmp_path / "again") == opened.manifest
    for name in ("manifest.json", "tables.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (artifact / name).read_bytes()


def test_the_checksum_of_a_tensor_is_that_of_its_bytes(artifact: Path) -> None:
    """As any other reader of the format would compute it."""
    entries = json.loads((artifact / "manifest.json").read_text())
    raw = (artifact / "tables.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    kept = {"dense": [0, 1, 2], "nothing left": [], 'pac"ké': [32]}
    for name, entry in json.loads(raw[8:start]).items():
        table, key = name.rsplit(".", 1)
        first, last = entry["data_offsets"]
        tensor = raw[start + first : start + last]
        found = zlib.crc32(tensor)
        if key in ("rows", "scale_bias"):
            width = len(tensor) // max(len(kept[table]), 1)
            rows = [tensor[row * width :][:width] for row in range(len(kept[table]))]
            found = sum(map(hash_by_hand, kept[table], rows))
        assert f"{found % 2**64:08x}" == entries["tables"][table]["checksums"][key]


def hash_by_hand(id: int, row: bytes) -> int:
    """What a row adds to the checksum of its tensor, before it is cut to 64 bits."""
    row += bytes(-len(row) % 4)
    words = [
        int.from_bytes(row[at : at + 4], "little", signed=True) for at in range(0, len(row), 4)
    ]
    factors = [splitmix(number) | 1 for number in range(len(words) + 1)]
    product = sum(a * b for a, b in zip([id, *words], factors, strict=True))
    return finished(product % 2**64)


def splitmix(number: int) -> int:
    return finished((number + 1) * 0x9E3779B97F4A7C15 % 2**64)


def finished(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@pytest.mark.parametrize("name", ["manifest.json", "tables.safetensors"])
def test_every_flipped_bit_is_refused(copied: Path, name: str) -> None:
    with open(copied / name, "r+b", buffering=0) as file:
        for position, byte in enumerate((copied / name).read_bytes()):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                with pytest.raises(ValueError, match=name):
                    open_artifact(copied)
            os.pwrite(file.fileno(), bytes([byte]), position)
    open_artifact(copied)


@pytest.mark.parametrize("name", ["manifest.json", "tables.safetensors"])
def test_truncated_and_longer_files_are_refused(copied: Path, name: str) -> None:
    file = copied / name
    whole = file.read_bytes()
    for wrong in (
        b"",
        whole[:7],
        whole[:-1],
        whole[: len(whole) // 2],
        whole + b"\0",
        whole + b"\n",
    ):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=name):
            open_artifact(copied)


@pytest.mark.parametrize("name", ["manifest.json", "tables.safetensors"])
def test_missing_files_are_refused(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(ValueError, match=name):
        open_artifact(copied)


def test_other_files_are_not_read(copied: Path) -> None:
    manifest = open_artifact(copied).manifest
    (copied / "README.md").write_text("What this serves.")
    assert open_artifact(copied).manifest == manifest


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and give it a CRC32 that fits."""
    entries = json.loads((path / "manifest.json").read_text())
    del entries["crc32"]
    change(entries)
    crc = zlib.crc32(json.dumps(entries, indent=1).encode())
    text = json.dumps({**entries, "crc32": f"{crc:08x}"}, indent=1) + "\n"
    (path / "manifest.json").write_text(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"].update({"/etc/passwd": m["files"].pop("tables.safetensors")}),
        lambda m: m["files"].update(
            {"../tables.safetensors": m["files"].pop("tables.safetensors")}
        ),
        lambda m: m.update(version=2),
        lambda m: m.update(format="pickle"),
        lambda m: m.update(dtype="fp32"),
        lambda m: m.pop("tables"),
        lambda m: m["tables"].pop("dense"),
        lambda m: m["tables"].update({"../dense": m["tables"].pop("dense")}),
        lambda m: m["tables"]["dense"].update(rows=4),
        lambda m: m["tables"]["dense"].update(dim=1 << 70),
        lambda m: m["tables"]['pac"ké'].update(dim=1 << 45),
        lambda m: m["tables"]["dense"].update(kept=-3),
        lambda m: m["tables"]["dense"].update(before=-1),
        lambda m: m["tables"]["dense"].update(pooling="max"),
        lambda m: m["tables"]["dense"]["checksums"].pop("rows"),
        lambda m: m["tables"]['pac"ké'].update(rows=32),
        lambda m: m["collections"][0].update(kind="pickle"),
        lambda m: m["collections"][0].update(shell="rm"),
        lambda m: m["collections"][0].update(weighted="always"),
        lambda m: m["collections"][0].update(weighted=1),
        lambda m: m["collections"][0]["features"][0].update(table="unknown"),
        lambda m: m.update(collections=3),
    ],
)
def test_a_crafted_manifest_is_refused(
    copied: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """One whose own CRC32 fits: no name leads out of the folder, and nothing is looked up out of
    bounds."""
    rewritten(copied, lambda entries: None)
    open_artifact(copied)
    rewritten(copied, change)
    with pytest.raises(ValueError, match=r"manifest\.json|tables\.safetensors"):
        open_artifact(copied)


def test_a_feature_of_another_collection_s_table_is_refused(copied: Path) -> None:
    """Of one that the artifact has, and the collection does not list."""

    def leave_out(manifest: dict[str, Any]) -> None:
        collection = manifest["collections"][0]
        collection["tables"] = [
            name for name in collection["tables"] if name != collection["features"][0]["table"]
        ]

    rewritten(copied, leave_out)
    with pytest.raises(
        ValueError,
        match=r"manifest\.json is refused: collection .* has features of \[.*\], none of",
    ):
        open_artifact(copied)


@pytest.mark.parametrize(
    "words", [[0, 2], [0, 3], [1, 1], [-1, -1]], ids=["beyond", "both", "two", "all"]
)
def test_a_bitmap_that_keeps_other_rows_is_refused(tmp_path: Path, words: list[int]) -> None:
    wrong = {**TENSORS, 'pac"ké.kept': torch.tensor(words, dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"tables\.safetensors.*kept"):
        write(tmp_path / "artifact", wrong)
    assert not [*tmp_path.iterdir()]


def test_nothing_is_overwritten_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "artifact"
    for there in (
        path.mkdir,
        lambda: (path.rmdir(), path.touch()),
        lambda: (path.unlink(), path.symlink_to("lost")),
    ):
        there()
        with pytest.raises(ValueError, match="exists already"):
            ArtifactWriter(path)
    path.unlink()
    with pytest.raises(NotADirectoryError):
        ArtifactWriter(Path(__file__) / "missing" / "artifact")
    for new in (path, tmp_path / "missing" / "parents" / "artifact"):
        with (
            pytest.raises(ValueError, match="damaged"),
            ArtifactWriter(new) as writer,
        ):
            writer.begin(TABLES)
            writer.finish(MANIFEST)
    with ArtifactWriter(path) as writer:
        writer.begin(TABLES)
        for name, tensor in TENSORS.items():
            writer.append(name, tensor)
        sealed = writer.seal(MANIFEST)
        path.mkdir()  # by another process, in the meantime
        with pytest.raises(ValueError, match="exists already"):
            writer.publish(sealed)
    path.rmdir()
    assert not [each for each in tmp_path.rglob("*") if each.name not in ("missing", "parents")]


@pytest.mark.timeout(60)
def test_leftovers_that_no_export_left(tmp_path: Path) -> None:
    """A named pipe is not opened: it would wait. A link is not followed, and nothing behind it is
    deleted."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "tables.safetensors").write_text("of another")
    beside = tmp_path / "exports"
    beside.mkdir()
    pipe, linked, link, plain = (beside / f".artifact.{n * 8}.partial" for n in "1234")
    for folder in (pipe, linked):
        folder.mkdir()
    os.mkfifo(pipe / "tables.safetensors")
    (linked / "tables.safetensors").symlink_to(outside / "tables.safetensors")
    link.symlink_to(outside, target_is_directory=True)
    plain.mkdir()
    (plain / "tables.safetensors").touch()
    (plain / "more").symlink_to(outside, target_is_directory=True)
    (plain / "pipe").mkdir()
    os.mkfifo(plain / "pipe" / "pipe")
    write(beside / "artifact", TENSORS)
    assert {*beside.iterdir()} == {beside / "artifact", pipe, linked, link}
    assert [each.read_text() for each in outside.iterdir()] == ["of another"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["tables.safetensors", "manifest.json"])
def test_a_pipe_is_no_artifact(copied: Path, name: str) -> None:
    (copied / name).unlink()
    os.mkfifo(copied / name)
    with pytest.raises(ValueError, match=f"{name}"):
        open_artifact(copied)


@pytest.mark.slow
def test_a_killed_writer_leaves_no_artifact(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch\nfrom tests.serving.test_artifact import *\n"
        "writer = ArtifactWriter(sys.argv[1])\nwriter.begin(TABLES)\n"
        "for name, tensor in TENSORS.items(): writer.append(name, tensor)\n"
        "writer.seal(MANIFEST)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "artifact")], timeout=120)
    assert done.returncode == -9
    [left] = tmp_path.iterdir()
    assert left.name.endswith(".partial")
    with pytest.raises(ValueError, match="unfinished export"):
        open_artifact(left)
    named = left.rename(tmp_path / "artifact")
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        open_artifact(named)
    named.rename(left)
    # The next one to the same path removes it, and nothing of one that lives.
    with (
        ArtifactWriter(tmp_path / "other") as other,
        ArtifactWriter(named) as living,
        ArtifactWriter(named) as second,
    ):
        assert {*tmp_path.iterdir()} == {living.folder, second.folder, other.folder}
