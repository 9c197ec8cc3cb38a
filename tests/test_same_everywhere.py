"""The same hundred batches in every form of a model: equal, or refused by name. Never neither.

Forms of a collection: plain and sharded with zeros in its removed rows, masked, compact, and each
served one. They are compared with sums by hand in float64, and bit for bit where contracts C12 and
C18 say so. Batches are drawn: weights or none, of several dtypes, ids of several dtypes, empty
bags, no samples, ids out of range, duplicates, ids behind the last bag.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec import KeyedJaggedTensor

from dist_sparse import Advanced, compact, export, load_served, sparsify
from tests.dist.batches import COLUMNS, OUTPUTS, by_hand, outputs_of, pruned
from tests.dist.pieces import shared_folder
from tests.dist.plugin import on_ranks

Outputs = Mapping[str, Tensor]
Form = Callable[[Any], Outputs]

BATCHES = 100

TOLERANCE = 5e-6
"""Of sums in float32, beside sums in float64; TorchRec's means divide by 1e-6 too much."""

REFUSALS = (ValueError, RuntimeError, IndexError, NotImplementedError)
"""A RuntimeError is FBGEMM's, for an id out of range, or TorchRec's or torch.export's own."""


class Kind(NamedTuple):
    """What a batch has, the same on every rank: all refuse it before they communicate, or none."""

    size: int
    ids: torch.dtype
    weights: torch.dtype | None
    loose: int
    strays: bool
    most: int

    @property
    def trains_everywhere(self) -> bool:
        """Whether TorchRec distributes such a batch, in every sharding."""
        return not self.loose and self.weights in (None, torch.float32)


def kind_of(number: int) -> Kind:
    draw = torch.Generator().manual_seed(number)

    def one_of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    dtypes = (torch.float64, torch.float16, torch.int64, torch.bool)
    return Kind(
        size=one_of(0, 1, 3, 3, 6, 6),
        ids=one_of(torch.int32, torch.int64, torch.int64, torch.int64),
        weights=one_of(None, None, None, torch.float32, torch.float32, one_of(*dtypes)),
        loose=one_of(0, 0, 0, 0, 0, 0, 3),
        strays=one_of(False, False, False, False, True),
        most=one_of(1, 3, 9),
    )


def batch_of(number: int, rank: int) -> KeyedJaggedTensor:
    kind = kind_of(number)
    draw = torch.Generator().manual_seed(1000 * number + rank)
    # Always in one order: a sharded collection reads by the places of the first batch's keys.
    keys = ["bought", "unused", "both", "buyer"]
    lengths = torch.randint(0, kind.most + 1, (len(keys) * kind.size,), generator=draw)
    if kind.size:
        # So that a stray id is there on every rank, or on none.
        lengths[0] = 1
    count = int(lengths.sum()) + kind.loose
    ids = torch.randint(0, 33, (count,), generator=draw)
    if kind.strays and kind.size:
        # FBGEMM raises for -1 on a CPU, on the rank that holds the table alone.
        ids[0] = 40 if kind.trains_everywhere else -1
    weights = None
    if kind.weights is not None:
        weights = (torch.randint(1, 9, (count,), generator=draw) / 4).to(kind.weights)
    return KeyedJaggedTensor(keys, ids.to(kind.ids), weights=weights, lengths=lengths)


def strays_as_0(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A batch as FBGEMM's own module reads it: an id out of range is the id 0."""
    ids = batch.values()
    inside = ids.where((ids >= 0) & (ids < 40), 0)
    return KeyedJaggedTensor(
        batch.keys(), inside, weights=batch.weights_or_none(), lengths=batch.lengths()
    )


def by_tensors(module: Any, takes_ends: bool, pooling: str | None) -> Form:
    """A form that takes tensors, feature after feature in the order of the outputs."""

    def form(batch: KeyedJaggedTensor) -> Outputs:
        lengths = batch.lengths().view(len(batch.keys()), -1)
        spans = dict(zip(batch.keys(), lengths.sum(1).cumsum(0).tolist(), strict=True))
        order = [batch.keys().index(output.partition("@")[0]) for output in OUTPUTS]
        places = []
        for key in order:
            end = spans[batch.keys()[key]]
            places.append(torch.arange(end - int(lengths[key].sum()), end))
        loose = batch.values().numel() - int(lengths.sum())
        places.append(torch.arange(batch.values().numel() - loose, batch.values().numel()))
        place = torch.cat(places)
        given = batch.weights_or_none()
        args = [batch.values()[place], lengths[order].flatten()]
        if takes_ends:
            args[1] = F.pad(args[1].cumsum(0), (1, 0))
        found = module(*args, *([] if given is None else [given[place]]))
        if pooling:
            return dict(zip(OUTPUTS, found.split(COLUMNS, dim=1), strict=True))
        return dict(zip(OUTPUTS, found.split(lengths[order].sum(1).tolist()), strict=True))

    return form


def saved(served: Any, folder: Path, **how: Any) -> Any:
    """A served model that was saved by torch.export, and loaded."""
    served.to_pt2(folder / "lookup.pt2", **how)
    return torch.export.load(folder / "lookup.pt2").module()


def from_files(served: Any, pooling: str | None) -> Form:
    """The form of saved lookups: one takes weights, and one does not."""
    with tempfile.TemporaryDirectory() as folder:
        bare = by_tensors(saved(served, Path(folder)), False, pooling)
        weighing = None
        if pooling == "sum":
            weighing = by_tensors(saved(served, Path(folder), weights=True), False, pooling)

    def form(batch: KeyedJaggedTensor) -> Outputs:
        if batch.weights_or_none() is None:
            return bare(batch)
        if weighing is None:
            raise ValueError("to_pt2() refuses weights.")
        return weighing(batch)

    return form


def served_forms(folder: Path, pooling: str | None) -> dict[str, Form]:
    """Every way to serve the artifact in ``folder``."""
    served, pure = load_served(folder), load_served(folder, fbgemm=False)
    forms: dict[str, Form] = {
        "served": lambda batch: outputs_of(served(batch)),
        "served, in torch": lambda batch: outputs_of(pure(batch)),
        "to_fbgemm": by_tensors(served.to_fbgemm(), True, pooling),
    }
    if pooling:
        quantized: Any = served.to_torchrec()
        forms["to_torchrec"] = lambda batch: outputs_of(quantized(batch))
    if dist.get_world_size() == 1:
        # torch.export takes seconds, and an artifact is the same from any number of ranks.
        forms["to_pt2"] = from_files(pure, pooling)
    return forms


def outcome(form: Form, batch: Any) -> Outputs | Exception:
    try:
        return form(batch)
    except REFUSALS as error:
        return error


def check_same(found: Any, expected: Any, tolerance: float, about: Any) -> None:
    """Compare outputs, or errors by their type."""
    if isinstance(found, Exception) or isinstance(expected, Exception):
        assert type(found) is type(expected), (about, found, expected)
        return
    for name, values in expected.items():
        mine = found[name].double()
        assert mine.shape == values.shape, (about, name, mine.shape, values.shape)
        torch.testing.assert_close(
            mine,
            values.double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text: f"{about} {text}",
        )


SHARDINGS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel")


@pytest.mark.whole
@on_ranks(2)
def test_collections() -> None:
    check_collections("row_wise", "sum")


@pytest.mark.slow
@on_ranks(1, 2)
@pytest.mark.parametrize("pooling", ["sum", "mean", None])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_sharding(world: int, sharding: str, pooling: str | None) -> None:
    if pooling is None and sharding in ("table_row_wise", "data_parallel"):
        # TorchRec has no such sharding of sequences; data-parallel ones come pooled on a CPU.
        return
    check_collections(sharding, pooling)


def check_collections(sharding: str, pooling: str | None) -> None:
    plain, _ = pruned(sharding, pooling, "plain")
    masked, sparse = pruned(sharding, pooling, "masked")
    small, _ = pruned(sharding, pooling, "compact")
    folder = Path(shared_folder()) / "served"
    export(small, None, folder)
    forms: dict[str, Form] = {
        "compact": lambda batch: outputs_of(small(batch)),
        **served_forms(folder, pooling),
    }
    world = dist.get_world_size()
    is_cut = sharding in ("row_wise", "table_row_wise")
    equal = Counter[str]()
    for number in range(BATCHES):
        kind, batch = kind_of(number), batch_of(number, dist.get_rank())
        expected = by_hand(batch, pooling, is_cut)
        # With several ranks, TorchRec raises for the others on the rank that holds a table alone.
        if kind.trains_everywhere or (world == 1 and not kind.loose):
            trained = outcome(lambda batch: outputs_of(plain(batch)), batch)
            found = outcome(lambda batch: outputs_of(masked(batch)), batch)
            check_same(found, trained, 1e-6 if pooling == "mean" else 0.0, kind)
            # FBGEMM reads an id out of range as row 0; nothing else does.
            if kind.trains_everywhere and not (kind.strays or isinstance(trained, Exception)):
                check_same(trained, expected, TOLERANCE, kind)
                # Where a rank adds up the same kept rows as before: contract C12.
                found = outcome(forms["compact"], batch)
                if not (is_cut or pooling == "mean"):
                    check_same(found, trained, 0.0, ("compact", kind))
        for name, form in forms.items():
            by_form = expected
            if name == "to_fbgemm" and kind.strays:
                by_form = by_hand(strays_as_0(batch), pooling, is_cut)
            found = outcome(form, batch)
            if not isinstance(found, Exception):
                equal[name] += 1
                check_same(found, by_form, TOLERANCE, (name, number, kind))
    # What all must serve, so that refusing everything does not pass.
    usual = 0
    for kind in map(kind_of, range(BATCHES)):
        weighs = kind.weights is not None
        usual += kind.trains_everywhere and not kind.strays and (not weighs or pooling == "sum")
    assert usual > 30 and min(equal[name] for name in forms) >= usual, (usual, equal)
    sparse.detach()


class TorchKind(NamedTuple):
    """What a batch of a torch table has.

    Args:
        ends: how bags are delimited: ``"matrix"``, ``"starts"`` or, with the last end,
            ``"closed"``.
        wrong: what is wrong with it; empty if nothing is. torch crashes on some of these.
    """

    ends: str
    ids: torch.dtype
    weighs: bool
    strays: bool
    wrong: str


def torch_kind(number: int) -> TorchKind:
    draw = random.Random(number)
    ends = draw.choice(["matrix", "starts", "closed"])
    # Without a last offset, all ids behind the others belong to the last bag.
    wrong = draw.choice(["first", "falling", "beyond", *(["loose"] if ends == "closed" else [])])
    return TorchKind(
        ends=ends,
        ids=draw.choice([torch.int32, torch.int64]),
        weighs=draw.random() < 0.3,
        strays=draw.random() < 0.15,
        wrong=wrong if ends != "matrix" and draw.random() < 0.3 else "",
    )


def torch_batch(number: int, kind: TorchKind) -> tuple[Tensor, ...]:
    """Ids, offsets and weights, as a table of torch takes them."""
    draw = random.Random(-number - 1)
    lengths = [draw.randrange(4) for _ in range(draw.randrange(1, 6))]
    if kind.ends == "matrix":
        lengths = [draw.randrange(1, 4)] * draw.randrange(6)
    if kind.wrong:
        lengths = [2, 3, 1, *lengths]
    count = sum(lengths)
    ids = torch.tensor([draw.randrange(50) for _ in range(count)], dtype=kind.ids)
    if kind.strays and count:
        ids[0] = draw.choice([-1, 50])
    offsets = F.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0))
    if kind.wrong == "first":
        offsets[0] = 1
    elif kind.wrong == "falling":
        offsets[1] = offsets[2] + 1
    elif kind.wrong == "beyond":
        offsets[2] = count + 9
    elif kind.wrong == "loose":
        ids = F.pad(ids, (0, 3))
    if kind.ends == "matrix":
        args = [ids.view(len(lengths), -1) if lengths else ids.view(0, 3)]
    else:
        args = [ids, offsets if kind.ends == "closed" else offsets[:-1]]
    if kind.weighs:
        args += [None] * (2 - len(args)) + [torch.rand(args[0].shape)]  # type: ignore[list-item]
    return tuple(args)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "sequence"])
def test_tables_of_torch(mode: str, closed: bool, tmp_path: Path) -> None:
    """nn.EmbeddingBag and nn.Embedding: torch itself, masked, compact and served."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        if mode == "sequence":
            return nn.Sequential(nn.Embedding(50, COLUMNS))
        return nn.Sequential(nn.EmbeddingBag(50, COLUMNS, mode=mode, include_last_offset=closed))

    def pruned_as(how: str) -> Any:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparse = sparsify(
            model, optimizer, level=0.6, block="row", end=0, advanced=Advanced(min_rows=0)
        )
        sparse.step()
        return compact(model, sparse) if how == "compact" else (model, sparse)

    plain, sparse = pruned_as("plain")
    sparse.detach()
    masked, attached = pruned_as("masked")
    small = pruned_as("compact")
    export(small, None, tmp_path / "served")
    served = load_served(tmp_path / "served")
    forms: dict[str, Any] = {
        "masked": masked[0],
        "compact": small[0],
        "served": served,
        "served, in torch": load_served(tmp_path / "served", fbgemm=False),
    }
    equal = Counter[str]()
    for number in range(BATCHES):
        kind = torch_kind(number)
        # A table has offsets of one kind.
        if kind.ends == ("starts" if closed else "closed"):
            continue
        args = torch_batch(number, kind)
        if mode == "sequence":
            kind, args = kind._replace(wrong=""), args[:1]
        # torch reads memory outside of the ids if offsets are wrong.
        expected = None if kind.wrong else outcome(lambda args: plain[0](*args), args)
        for name, form in forms.items():
            if not (kind.wrong and name == "masked"):
                found = outcome(lambda args, form=form: form(*args), args)
                equal[name] += is_same(found, expected, (name, mode, kind))
    assert min(equal[name] for name in forms) > 20, equal
    attached.detach()


def is_same(found: Any, expected: Any, about: tuple[str, str, TorchKind]) -> bool:
    """Return whether torch and a form gave the same values. Raise where they differ, or where only
    one of them raises, with two exceptions."""
    name, mode, kind = about
    if isinstance(found, Exception):
        assert expected is None or isinstance(expected, Exception), (about, found)
    elif expected is None:
        # Served sums drop ids behind the last offset, as most kernels of torch do.
        assert "served" in name and (mode, kind.wrong) == ("sum", "loose"), about
    elif isinstance(expected, Exception):
        # An artifact serves zeros for ids out of range.
        assert "served" in name and kind.strays, (about, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        return True
    return False
