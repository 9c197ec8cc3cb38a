"""Checks of a batch of ids in bags, before any kernel runs.

Kernels trust lengths and offsets: a wrong one makes them read and write other memory. A graph that
``torch.export`` traces can't branch on a value: there each check of values is an assertion, a node
before the kernels. TorchScript compiles :func:`offsets_fit` and :func:`check_weights`.
"""

import torch
from torch import Tensor

_INTEGERS = (torch.int32, torch.int64)
_LENGTHS = (
    "Lengths must add up to the number of ids, and none may be negative; there are fewer than 2**31"
    " ids."
)
_OFFSETS = "Offsets begin with 0, never fall, and end with the number of ids."


def check_ids(ids: Tensor) -> None:
    """Refuse dtypes whose values a cast could turn into other ids.

    Raises:
        ValueError: they are not int32 or int64.
    """
    if ids.dtype not in _INTEGERS:
        raise ValueError(f"Invalid ids of dtype {ids.dtype}: must be int32 or int64.")


def check_lengths(ids: Tensor, lengths: Tensor, features: int) -> Tensor:
    """Return how many ids each feature has: int64 ``(features,)``.

    Args:
        ids: int32 or int64 ``(n,)``, feature after feature, and within a feature bag after bag.
        lengths: int32 or int64 ``(features * bags,)``: how many ids each bag has.

    Raises:
        ValueError: lengths are negative or do not add up to ``n``, or the shape or dtype of either
            is another.
    """
    # Each lookup comes here: no call unless something is wrong.
    is_integer = ids.dtype in _INTEGERS and lengths.dtype in _INTEGERS
    if not (is_integer and ids.dim() == lengths.dim() == 1):
        _refuse_vectors("lengths", ids, lengths)
    n = ids.size(0)
    if torch.compiler.is_compiling():
        counts = lengths.view(features, -1).sum(1)
        total = counts.sum()
        # Lengths in [0, 2**31) are shifted to 0. Without any other, int64 sums can't wrap.
        is_right = (total == n) & (total < 2**31) & ~(lengths >> 31).any()
        torch._assert_async(is_right, _LENGTHS)
        return counts
    if features == 0 or lengths.size(0) % features:
        raise ValueError(
            f"Invalid lengths of shape {tuple(lengths.shape)}: must be a multiple of the"
            f" {features} features."
        )
    counts = lengths.view(features, -1).sum(1)
    count = least = most = 0
    if lengths.size(0):
        extremes = torch.aminmax(lengths)
        if lengths.is_cpu:
            numbers = [*counts.tolist(), extremes[0].item(), extremes[1].item()]
        else:
            # The host waits once. On the CPU, this tensor takes longer than reading each number.
            numbers = torch.hstack((counts, *extremes)).tolist()
        *sums, least, most = numbers
        # Python's integers don't wrap, and sums of lengths up to n can't.
        count = sum(sums)
    fits = count == n < 2**31
    fits = fits and least >= 0 and most <= n
    if not fits:
        raise ValueError(_LENGTHS)
    return counts


def bag_offsets(ids: Tensor, offsets: Tensor, has_last: bool) -> Tensor:
    """Return where each bag begins and the last one ends, as kernels take it: contiguous int32
    ``(bags + 1,)``.

    Args:
        ids: int32 or int64 ``(n,)``, bag after bag.
        offsets: int32 or int64 ``(bags,)``, with ``has_last`` ``(bags + 1,)``.
        has_last: whether the last offset is the end of the last bag.

    Raises:
        ValueError: offsets do not begin with 0, fall, or do not end with ``n``, or the shape or
            dtype of either is wrong.
    """
    is_integer = ids.dtype in _INTEGERS and offsets.dtype in _INTEGERS
    if not (is_integer and ids.dim() == offsets.dim() == 1):
        _refuse_vectors("offsets", ids, offsets)
    n = ids.size(0)
    if not has_last:
        offsets = torch.cat([offsets, offsets.new_full((1,), n)])
    if torch.compiler.is_compiling():
        # A difference of offsets could wrap; a comparison can't.
        rises = (offsets[1:] >= offsets[:-1]).all()
        fits = rises & (offsets[0] == 0) & (offsets[-1] == n) & (offsets[-1] < 2**31)
        torch._assert_async(fits, _OFFSETS)
        return offsets.int()
    if not (offsets.size(0) > 0 and n < 2**31 and offsets_fit(offsets, n)):
        raise ValueError(_OFFSETS)
    return offsets.int().contiguous()


def offsets_fit(offsets: Tensor, count: int) -> bool:
    """Return whether offsets ``(n,)``, at least one, begin with 0, never fall, and end with
    ``count``."""
    if int(offsets[0]) != 0 or int(offsets[-1]) != count:
        return False
    # Offsets that never fall are their own running maximum. It takes two thirds of the time of a
    # comparison with their neighbors, but 16 bytes an offset: up to three times as long for many.
    if offsets.size(0) <= 8192:
        return torch.equal(offsets, offsets.cummax(0)[0])
    return bool((offsets[1:] >= offsets[:-1]).all())


def check_weights(
    ids: Tensor, weights: Tensor | None, is_needed: bool, refusal: str
) -> Tensor | None:
    """Return the weights of ids as kernels take them: contiguous float32, or None.

    Args:
        ids: of any shape.
        weights: of that shape, of any floating-point dtype.
        is_needed: whether None is refused.
        refusal: why weights are refused; empty if they are not.

    Raises:
        ValueError: weights are missing or refused, or have the wrong shape or dtype.
    """
    if weights is None:
        if is_needed:
            raise ValueError("The collection is weighted, and the batch has no weights.")
        return None
    if len(refusal) > 0:
        raise ValueError(refusal)
    if not weights.is_floating_point():
        raise ValueError(
            f"Invalid weights of dtype {weights.dtype}: must be floating-point; TorchRec ignores"
            " others in training, or raises."
        )
    # FBGEMM would read past the end of weights that are too few.
    if weights.shape != ids.shape:
        raise ValueError("Weights must have the shape of the ids.")
    return weights.float().contiguous()


def _refuse_vectors(name: str, ids: Tensor, bags: Tensor) -> None:
    """Raise ValueError with what is wrong with ids, or with the lengths or offsets of their
    bags."""
    check_ids(ids)
    if ids.dim() != 1 or bags.dim() != 1:
        raise ValueError(
            f"Invalid {name} of shape {tuple(bags.shape)} for ids of shape {tuple(ids.shape)}: both"
            " must be 1-D."
        )
    raise ValueError(f"Invalid {name} of dtype {bags.dtype}: must be int32 or int64.")
