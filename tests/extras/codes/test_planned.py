"""Codes as they are planned, and in other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from dist_sparse import export, load_served, plan
from dist_sparse.extras.codes import quantize
from dist_sparse.planning.candidates import CODED, Candidate, shape_of
from dist_sparse.tables.modules import ModelTables
from tests.planning.test_candidates import check
from tests.planning.test_plan import paste, used
from tests.serving.test_targets import offsets_of


@pytest.mark.parametrize("dtype", CODED)
def test_codes_of_large_tables_and_others_in_int4(dtype: str, tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {"large": nn.Embedding(20_000, 16), "odd": nn.EmbeddingBag(20_001, 7)}
        | {"small": nn.Embedding(19_999, 16)}
    )
    candidate = Candidate(dtype=dtype)
    tables = [shape_of(table) for table in ModelTables(model).locate()]
    codes = {table.name: candidate.codes(table) for table in tables}
    assert codes == {"large": 16 // CODED[dtype], "odd": 0, "small": 0}
    handle = quantize(model, [], codes={"large": codes["large"]}, begin=0, end=0)
    handle.step()
    check(candidate, model, tables, tmp_path / "served", handle)


def test_codes_where_only_they_fit_are_printed_and_make_what_was_planned(tmp_path: Path) -> None:
    model = nn.ModuleDict({"user": nn.EmbeddingBag(20_000, 32), "small": nn.EmbeddingBag(20, 32)})
    answer = plan(model, "7%")
    assert used(answer)[-1] == ("full", "codes of 4", 32)
    paste(answer, len(answer.recommended), model, [], tmp_path)


def test_codes_in_other_libraries(tmp_path: Path) -> None:
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=20_000, embedding_dim=8, feature_names=[f"of_{name}"]
        )
        for name in ("one", "two")
    ]
    model = EmbeddingBagCollection(configs)
    with quantize(model, [], codes=2, begin=0) as handle:
        handle.step()
        served: Any = load_served(export(model, handle, tmp_path / "served", dtype="codes"))
    lengths = torch.randint(0, 4, (14,))
    ids = torch.randint(20_000, (int(lengths.sum()),))
    expected = served(ids, lengths)
    assert expected.any()
    assert torch.equal(served.to_fbgemm()(ids, offsets_of(lengths)), expected)
    jagged = KeyedJaggedTensor(["of_one", "of_two"], ids, lengths=lengths)
    assert torch.equal(served.to_torchrec()(jagged).values(), served(jagged).values())
