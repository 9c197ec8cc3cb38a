"""Books of a table, and the decoder of its codes.

The columns of a table are cut into groups of equal width. A book holds 256 vectors of that width
for one group, and a row is one byte per group: product quantization (Jégou et al., 2011). The books
of a table are one tensor, float16 ``(groups, 256, width)``. Entry 0 of every book is zeros, so
a row of zeros, such as a removed one, has codes 0 and decodes to exactly 0.
"""

import torch
from torch import Tensor

# The number of entries of a book: a byte has as many values.
ENTRIES = 256

# The largest magnitude of an entry.
LARGEST_HALF = torch.finfo(torch.float16).max

# Smaller tables have no codes: at 64 columns the books of 32 KiB would take more than a byte per
# row.
LEAST_ROWS = 20_000

# An entry of 1, 2 or 4 weights viewed as one number of that size: gathering numbers takes half the
# time of gathering rows.
_ENTRY_DTYPES = {1: torch.int32, 2: torch.int64, 4: torch.complex128}


def decode_books(codes: Tensor, books: Tensor, columns: int) -> Tensor:
    """Return the weights of coded rows, float32 ``(n, columns)``.

    Args:
        codes: uint8 ``(n, groups)``.
        books: float16 ``(groups, 256, width)``.
        columns: the number of columns of the table; the last group may have more, which are
            dropped.
    """
    starts = ENTRIES * torch.arange(len(books), device=codes.device, dtype=torch.int32)
    return gather_entries(codes + starts, books.flatten(0, 1).float())[:, :columns]


def gather_entries(places: Tensor, entries: Tensor) -> Tensor:
    """Return the entries at ``places`` side by side: float32 ``(n, groups * width)``.

    Args:
        places: rows of ``entries``, int32 or int64, ``(n, groups)``.
        entries: float32 ``(entries, width)``, contiguous. Books are converted before they are
            gathered: converting the result would allocate its size twice.
    """
    groups, width = places.shape[1], entries.shape[1]
    numbers = entries.view(_ENTRY_DTYPES.get(width, torch.float32)).squeeze(1)
    gathered = numbers.index_select(0, places.flatten()).view(torch.float32)
    return gathered.view(-1, groups * width)
