"""Counts of lookups as a record: of a folder, and of any batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import dist_sparse
from dist_sparse import LookupCounts, count_lookups, remove_untouched
from dist_sparse.remove import RemovedRows

ROWS = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Counts of a table, as they were saved."""
    counts = LookupCounts({"weight": torch.arange(ROWS) % 3}, batches=1)
    counts.save(tmp_path / "counts")
    return tmp_path / "counts"


def use(record: Path | str) -> RemovedRows:
    return remove_untouched(nn.EmbeddingBag(ROWS, 8), record=record, trust_record=True)


class TestFolders:
    def test_what_was_saved_is_a_record(self, folder: Path) -> None:
        assert use(folder).removed == {"weight": 34}

    def test_no_folder(self, tmp_path: Path) -> None:
        """Nor a file, nor another folder."""
        (tmp_path / "file").write_text("")
        for missing in ("nowhere", "file", "."):
            with pytest.raises(ValueError, match=r"holds no lookup counts: it must be a folder"):
                use(str(tmp_path / missing))

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda folder: (folder / "0.int64").unlink(), "0.int64 is missing"),
            (lambda folder: (folder / "0.int64").write_bytes(b"12"), "0.int64 does not fit"),
            (lambda folder: (folder / "counts.json").write_text("{}"), "CRC32 does not fit"),
            (lambda folder: (folder / "counts.json").write_bytes(b"\xff\xfe"), "'utf-8'"),
        ],
    )
    def test_damage(self, folder: Path, damage: Callable[[Path], object], message: str) -> None:
        damage(folder)
        with pytest.raises(ValueError, match=rf"counts\.json is refused: .*{message}"):
            use(folder)


def test_a_record_and_an_optimizer_are_refused() -> None:
    """The optimizer would be ignored."""
    model = nn.EmbeddingBag(ROWS, 8)
    optimizer = torch.optim.Adam(model.parameters())
    record = {"weight": torch.ones(ROWS, dtype=torch.int64)}
    with pytest.raises(ValueError, match="Invalid optimizer: the lookups of record= tell"):
        remove_untouched(model, optimizer, record=record)


def test_errors_name_the_function_where_it_can_be_called() -> None:
    model = nn.EmbeddingBag(ROWS, 8)
    with pytest.raises(ValueError, match=r"record=dist_sparse\.count_lookups\(batches, model\)"):
        remove_untouched(model)
    assert dist_sparse.count_lookups is count_lookups


@pytest.mark.parametrize(
    "counts", [torch.ones(ROWS, dtype=torch.int32), torch.ones(ROWS, 1).long()]
)
def test_counts_of_another_type_or_shape_are_refused(counts: torch.Tensor) -> None:
    """Counts of 32 bits could be saved, and not be loaded."""
    with pytest.raises(ValueError, match=r"Table 'weight': lookup counts are .* must be int64"):
        LookupCounts({"weight": counts}, batches=1)


def test_a_deduplicated_batch_counts_as_the_whole_one() -> None:
    """Each example reads all ids of its bag: removed ids are read by all that share it."""
    sizes = {"a": 3, "b": 7}
    lengths = {name: torch.randint(4, (size,)) for name, size in sizes.items()}
    bags = {name: torch.randint(size, (12,)) for name, size in sizes.items()}
    ids = {name: torch.randint(ROWS, (int(each.sum()),)) for name, each in lengths.items()}
    # One more feature, which no table has.
    values = torch.cat([*ids.values(), torch.tensor([5, 6])])
    stored = KeyedJaggedTensor(
        [*sizes, "unknown"],
        values,
        lengths=torch.cat([*lengths.values(), torch.tensor([2])]),
        stride_per_key_per_rank=[[3], [7], [1]],
        inverse_indices=(["b", "a"], torch.stack([bags["b"], bags["a"]])),
    )
    whole = {name: [*ids[name].split(lengths[name].tolist())] for name in sizes}
    repeated = [whole[name][bag] for name in sizes for bag in bags[name].tolist()]
    counted = torch.tensor([len(each) for each in repeated])
    batch = KeyedJaggedTensor([*sizes], torch.cat(repeated), lengths=counted)
    model = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=ROWS, embedding_dim=4, feature_names=[name]
            )
            for name in sizes
        ]
    )
    found, wanted = count_lookups([stored], model), count_lookups([batch], model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    record = {f"t_{name}": torch.randint(2, (ROWS,)) for name in sizes}
    removed = remove_untouched(model, record=record, trust_record=True)
    share = removed.share([stored])
    assert share == removed.share([batch])
    assert share.examples == 12 and share.affected > 0


@pytest.mark.whole
@pytest.mark.parametrize("kind", [dict, KeyedJaggedTensor])
def test_one_batch_in_the_place_of_several_is_refused(kind: type) -> None:
    batch: Any = {"weight": torch.tensor([1])}
    if kind is KeyedJaggedTensor:
        batch = KeyedJaggedTensor(["weight"], torch.tensor([1]), lengths=torch.tensor([1]))
    model = nn.EmbeddingBag(ROWS, 8)
    message = rf"Invalid batches of type {kind.__name__}: must be several: pass \[batch\]\."
    with pytest.raises(ValueError, match=message):
        count_lookups(batch, model)
    removed = remove_untouched(
        model, record={"weight": torch.ones(ROWS, dtype=torch.int64)}, trust_record=True
    )
    with pytest.raises(ValueError, match=message):
        removed.share(batch)
