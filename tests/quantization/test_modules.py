"""Quantized modules equal float modules with the same weights."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse import DataNormSparsifier, post_training_sparse_quantize
from dist_sparse.quantization.modules import QuantizedEmbedding, QuantizedEmbeddingBag


def quantized(module: nn.Module) -> Any:
    holder = nn.Sequential(module)
    post_training_sparse_quantize(holder, DataNormSparsifier, sparsity_level=0.5)
    return holder[0]


def bag(**options: Any) -> tuple[Any, nn.EmbeddingBag]:
    """A quantized bag, and the float bag of its weights."""
    made = quantized(nn.EmbeddingBag(50, 6, **options))
    options.pop("dtype", None)
    return made, nn.EmbeddingBag(50, 6, _weight=made.weight(), **options).requires_grad_(False)


def saved(thing: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_embedding_returns_its_weights_bit_for_bit(dtype: torch.dtype, padding_idx: int | None) -> None:
    module = quantized(nn.Embedding(50, 7, padding_idx=padding_idx, dtype=dtype))
    assert type(module) is QuantizedEmbedding
    weight = module.weight()
    assert weight.dtype == dtype and weight.shape == (50, 7) and weight.is_contiguous()
    assert torch.equal(torch.dequantize(weight), weight.float())  # as users of the ancestor write it
    for shape in [(), (0,), (9,), (4, 5), (2, 3, 4)]:
        for ids in (torch.randint(50, shape), torch.randint(50, shape, dtype=torch.int32)):
            found = module(ids)
            assert found.dtype == dtype and found.shape == (*shape, 7) and not found.requires_grad
            assert torch.equal(found, weight[ids.long()])
    assert torch.equal(module(input=torch.arange(50)), weight)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 0, 3, -1])
@pytest.mark.parametrize("last", [False, True])
def test_bags_are_those_of_a_float_module(mode: str, padding_idx: int | None, last: bool) -> None:
    ours, theirs = bag(mode=mode, padding_idx=padding_idx, include_last_offset=last)
    assert type(ours) is QuantizedEmbeddingBag and ours.mode == mode
    for kind in (torch.int64, torch.int32):
        for starts in ([0, 3, 3, 3, 17], [0, 0], [0]):
            ids = torch.randint(5, (40,), dtype=kind)
            ids[20:] = torch.randint(50, (20,), dtype=kind)
            offsets = torch.tensor([*starts, 40] if last else starts, dtype=kind)
            found = ours(ids, offsets)
            assert found.dtype == torch.float32 and not found.requires_grad
            torch.testing.assert_close(found, theirs(ids, offsets), rtol=1e-6, atol=1e-6)
        for shape in [(4, 9), (1, 1), (0, 3)]:
            ids = torch.randint(5, shape, dtype=kind)
            torch.testing.assert_close(ours(ids), theirs(ids), rtol=1e-6, atol=1e-6)
        nothing = torch.zeros(0, dtype=kind)
        for offsets in (torch.zeros(3, dtype=kind), torch.zeros(1, dtype=kind)):
            assert torch.equal(ours(nothing, offsets), theirs(nothing, offsets))


def test_bags_of_a_single_id_are_its_weights_bit_for_bit() -> None:
    ours, _ = bag(mode="sum")
    assert torch.equal(ours(torch.arange(50)[:, None]), ours.weight())


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_weighted_bags(padding_idx: int | None) -> None:
    ours, theirs = bag(mode="sum", padding_idx=padding_idx)
    ids, offsets, factors = torch.randint(9, (30,)), torch.tensor([0, 7, 7]), torch.rand(30, requires_grad=True)
    found, expected = ours(ids, offsets, factors), theirs(ids, offsets, factors)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(result.square().sum(), factors)[0] for result in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    found = ours(input=ids.view(5, 6), per_sample_weights=factors.view(5, 6))
    torch.testing.assert_close(found, theirs(ids.view(5, 6), per_sample_weights=factors.view(5, 6)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bags_of_other_dtypes(dtype: torch.dtype) -> None:
    ours, theirs = bag(mode="sum", dtype=dtype)
    ids, factors = torch.randint(50, (8, 5)), torch.rand(8, 5, dtype=dtype)
    found = ours(ids, per_sample_weights=factors)
    exact = theirs.double()(ids, per_sample_weights=factors.double())
    assert found.dtype == dtype
    # float64: sums of exact products, where float32 would be off by 1e-7
    torch.testing.assert_close(found.double(), exact, rtol=1e-14 if dtype == torch.float64 else 1e-2, atol=1e-2)
    if dtype == torch.float64:
        torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)


def test_errors_are_those_of_float_modules() -> None:
    ours, theirs = bag(mode="mean")
    one, starts = torch.tensor([1]), torch.tensor([0])
    for arguments in (
        [torch.tensor([50]), starts],
        [torch.tensor([-1]), starts],
        [one],
        [one, torch.tensor([0, 5])],
        [one, torch.tensor([1])],
        [one.view(1, 1), starts],
        [one.view(1, 1, 1)],
        [one, starts, torch.ones(2)],
        [one, starts, torch.ones(1)],
        [one.float(), starts],
    ):
        with pytest.raises(Exception) as expected:
            theirs(*arguments)
        with pytest.raises(expected.type):
            ours(*arguments)
    with pytest.raises(RuntimeError, match=r"from 2 to 77 are not all in \[0, 50\)"):
        ours(torch.tensor([[2, 77]]))
    embedding = quantized(nn.Embedding(50, 4))
    for wrong in (50, -1):
        with pytest.raises(IndexError):
            embedding(torch.tensor([wrong]))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_copies_and_files(kind: Any) -> None:
    module, other = quantized(kind(50, 7, padding_idx=2)), quantized(kind(50, 7, padding_idx=2))
    state = module.state_dict()
    assert list(state) == ["rows"] and not list(module.parameters())
    assert not torch.equal(module.rows, other.rows)
    other.load_state_dict(saved(state, weights_only=True))
    ids = torch.randint(50, (6, 4))
    for copied in (
        other,
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        saved(module, weights_only=False),
    ):
        assert copied is not module and copied.rows.data_ptr() != module.rows.data_ptr()
        assert torch.equal(copied.rows, module.rows) and torch.equal(copied(ids), module(ids))
    with pytest.raises(RuntimeError, match="size mismatch"):
        quantized(kind(49, 7)).load_state_dict(state)


def test_to_a_dtype_or_device_and_modes() -> None:
    module = quantized(nn.Embedding(20, 4))
    rows, weight = module.rows, module.weight()
    assert module.train().training and not module.eval().training
    assert module.to("cpu") is module and torch.equal(module.weight(), weight)
    assert module.half()(torch.tensor([1])).dtype == torch.float16 and module.rows is rows
    assert torch.equal(module.weight(), weight.half())
    assert torch.equal(module.float().weight(), weight)
    assert module.to("meta").rows.is_meta and module(torch.tensor([1], device="meta")).shape == (1, 4)


def test_repr() -> None:
    assert repr(quantized(nn.Embedding(20, 4, padding_idx=1))) == (
        "QuantizedEmbedding(20, 4, padding_idx=1, dtype=torch.float32, bits=8)"
    )
    text = repr(quantized(nn.EmbeddingBag(20, 4, dtype=torch.float16)))
    assert text == "QuantizedEmbeddingBag(20, 4, dtype=torch.float16, bits=8, mode='mean')"


def test_saved_tables_take_a_quarter() -> None:
    def size(module: nn.Module) -> int:
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        return len(file.getvalue())

    floats = nn.Embedding(5000, 64)
    before = size(floats)
    module = quantized(floats)
    assert module.rows.numel() == 5000 * (64 + 8)
    assert size(module) < before * (72 / 256) + 2000


def test_no_gradient_reaches_the_table() -> None:
    module = nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 1))
    post_training_sparse_quantize(module, DataNormSparsifier)
    table: Tensor = module[0].rows  # type: ignore[assignment]
    before = table.clone()
    module(torch.randint(20, (3, 2))).sum().backward()
    assert module[1].weight.grad is not None and table.grad is None and torch.equal(table, before)
