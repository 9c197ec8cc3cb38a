"""Which weights are the same memory.

TorchRec, FBGEMM, torch's optimizers and a module each hand out a tensor object of their own for a
table: views, parameters and ``.data``. Only memory shows that they belong together. No other module
looks up by address: what belongs to a shard is found by the shard's tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, ValuesView
from typing import Generic, TypeVar

from torch import Size, Tensor

T = TypeVar("T")


class ByMemory(Generic[T]):
    """A mapping whose keys are weights: any view of the same elements in the same shape finds a
    value.

    Valid as long as no weight is resharded, loaded by assignment or freed: made for an operation
    and not kept.

    Args:
        known: weights with their values; of several values of one weight, the last wins.
    """

    def __init__(self, known: Iterable[tuple[Tensor, T]] = ()) -> None:
        # With the shape: all empty tables have the address 0, and the first table of a kernel
        # begins where the storage of all of them does.
        self._known: dict[tuple[int, Size], T] = {}
        for weight, value in known:
            self._known[weight.data_ptr(), weight.shape] = value

    def get(self, weight: Tensor) -> T | None:
        """Return the value of a weight, or None."""
        return self._known.get((weight.data_ptr(), weight.shape))

    def setdefault(self, weight: Tensor, value: T) -> T:
        """Return the value of a weight; ``value``, which it gets, if it has none."""
        return self._known.setdefault((weight.data_ptr(), weight.shape), value)

    def values(self) -> ValuesView[T]:
        """Return the values, in the order of their first weights."""
        return self._known.values()


def local(tensor: Tensor) -> Tensor:
    """Return a tensor, or the local tensor of a DTensor."""
    # Not by to_local(), which returns a new tensor with an autograd node.
    inner: Tensor = getattr(tensor, "_local_tensor", tensor)
    return inner


def same_storage(tensors: Sequence[Tensor]) -> Callable[[Tensor], list[int]]:
    """Return a function that lists the indices of the ``tensors`` that share memory with a given
    tensor.

    By memory: views and ``.data`` of a parameter are separate objects.
    """
    # First by storage, which holds one tensor in most cases.
    known: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for i, tensor in enumerate(map(local, tensors)):
        known[tensor.untyped_storage().data_ptr()].append((i, *memory_of(tensor)))

    def find(tensor: Tensor) -> list[int]:
        held = known.get(tensor.untyped_storage().data_ptr(), ())
        # An empty tensor ends where it begins.
        first, end = memory_of(tensor)
        return [i for i, start, behind in held if max(first, start) < min(end, behind)]

    return find


def check_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor with several elements in the same memory, such as an expanded one: no mask
    can tell them apart.

    Raises:
        ValueError: names the table, shape and strides.
    """
    # From the smallest stride up: each must step over all elements of the dimensions before it.
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= span:
            raise ValueError(
                f"Table {name!r}: its weights of shape {tuple(tensor.shape)} have the strides"
                f" {tensor.stride()}, so elements share memory; register a clone()."
            )
        span += stride * (size - 1)


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a non-empty tensor, and the address after its last
    byte. The tensor has passed :func:`check_memory`."""
    # Strides may be in any order: the last element has the largest index in every dimension.
    length = 1
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        length += stride * (size - 1)
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def shared_memory(
    known: Sequence[tuple[str, Tensor]], new: Sequence[tuple[str, Tensor]]
) -> tuple[str, str] | None:
    """Return the names of two tensors that share memory, one of them new; None if there are none.
    All tensors have passed :func:`check_memory`."""
    tensors = [*known, *new]
    spans = []
    for i, (_, tensor) in enumerate(tensors):
        # Empty tensors have no memory to share.
        if tensor.numel():
            spans.append((str(tensor.device), *memory_of(tensor), i))
    # By device and start: a span that overlaps an earlier one overlaps the one that ends last.
    reach = "", 0
    furthest = 0
    for device, start, end, i in sorted(spans):
        first, second = sorted((furthest, i))
        names = tensors[first][0], tensors[second][0]
        # Equal names: shards of one table, and of plain data, may be views of one tensor.
        if (device, start) < reach and second >= len(known) and names[0] != names[1]:
            return names
        if (device, end) > reach:
            reach = device, end
            furthest = i
    return None
