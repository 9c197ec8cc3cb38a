"""The training of ``examples/two_tower`` as a kernel in C, about ten times as fast: to tune many
methods alike.

A step equals TorchRec's to rounding; ``tests/dist/test_quality.py`` holds it to that. Tables are
NumPy arrays, which may be cut, masked and turned between epochs.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from two_tower.data import NEGATIVES, Interactions
from two_tower.model import INIT

__all__ = ["Books", "Model", "rotated"]

Floats = npt.NDArray[np.float32]

ENTRIES = 256
_SAMPLE, _FIRST_ROUNDS = 10_000, 8
_ROUNDS, _ASSIGNED = 2, 8
"""Rounds of k-means an epoch, and how often it assigns codes."""


class _Table(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("weight", "read", "state", "kept", "sums", "slot", "touched")
        ),
        ("count", ctypes.c_long),
    ]


_FAST = (
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
)
"""All of -ffast-math, except what makes numbers below 1e-38 zero in the whole process as soon as
the library is loaded."""


@cache
def _kernel() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    library = folder / "kernel.so"
    flags = ["-O3", "-march=native", *_FAST, "-shared", "-fPIC", "-lm"]
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            str(Path(__file__).with_name("quality_kernel.c")),
            "-o",
            str(library),
            *flags,
        ],
        check=True,
    )
    return ctypes.CDLL(str(library))


class Books:
    """Product quantization of a table: a byte for each group of neighboring columns, which selects
    one of the 256 entries of a book in float16. The first entry is zeros (Jegou et al., PAMI 2011).

    Books are k-means of sampled rows at first.

    Args:
        weight: the table, (rows, columns) float32.
        groups: bytes of a row.
        seed: draws the sample.
    """

    def __init__(self, weight: Floats, groups: int, seed: int) -> None:
        self.groups = groups
        made = np.random.default_rng(seed)
        sample = weight[made.permutation(len(weight))[:_SAMPLE]]
        # If there are fewer rows than entries, some are drawn twice.
        drawn = np.resize(np.arange(len(sample)), ENTRIES)
        self.books = self._grouped(sample)[drawn].transpose(1, 0, 2).copy()
        self._to_half()
        for _ in range(_FIRST_ROUNDS):
            self.refit(sample)

    def refit(self, weight: Floats) -> None:
        """Move each entry to the mean of what is nearest to it; zeros and entries without rows stay
        where they are."""
        codes, parts = self.codes(weight), self._grouped(weight)
        for group, book in enumerate(self.books):
            count = np.bincount(codes[:, group], minlength=ENTRIES)
            used = count > 0
            for column in range(book.shape[1]):
                total = np.bincount(codes[:, group], parts[:, group, column], ENTRIES)
                book[used, column] = total[used] / count[used]
        self._to_half()

    def codes(self, weight: Floats) -> npt.NDArray[np.uint8]:
        """Return the nearest entries, (rows, groups)."""
        halves = np.ascontiguousarray(np.square(self.books).sum(2) / 2)
        books = np.ascontiguousarray(self.books.transpose(0, 2, 1))
        found = np.empty((len(weight), self.groups), np.uint8)
        _kernel().nearest(
            ctypes.c_void_p(weight.ctypes.data),
            *map(ctypes.c_long, (len(weight), self.groups, self.books.shape[2])),
            *(ctypes.c_void_p(each.ctypes.data) for each in (books, halves, found)),
        )
        return found

    def decoded(self, weight: Floats) -> Floats:
        """Return the table that the codes stand for."""
        rows = self.books[np.arange(self.groups), self.codes(weight)]
        return np.ascontiguousarray(rows.reshape(weight.shape))

    def _grouped(self, weight: Floats) -> Floats:
        return weight.reshape(len(weight), self.groups, -1)

    def _to_half(self) -> None:
        self.books[:, 0] = 0
        self.books = self.books.astype(np.float16).astype(np.float32)


class Model:
    """Tables of users and of items, and a bias for each item, with Adagrad's state.

    Args:
        rows: of both tables.
        items: the number of items, each with a bias.
        dim: columns.
        seed: of the weights.

    Attributes:
        weights: of both tables, (rows, dim) float32.
        kept: masks of them, bool, or None; what is not kept stays 0.
        mean_of: the columns over which the squares of a gradient are averaged.
        books: of both tables, or None; lookups return decoded rows from where they are.
        seconds: of the CPU that training took.
    """

    def __init__(self, rows: Sequence[int], items: int, dim: int, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.weights: list[Floats] = [
            nn.init.uniform_(torch.empty(count, dim), -INIT, INIT, generator=made).numpy()
            for count in rows
        ]
        self.bias = np.zeros((items, 1), np.float32)
        self.states = [np.zeros(len(weight), np.float32) for weight in (*self.weights, self.bias)]
        self.kept: list[npt.NDArray[np.bool_] | None] = [None, None]
        self.mean_of = dim
        self.books: list[Books] | None = None
        self.seconds = 0.0

    def copy(self) -> Model:
        """Return a model that trains on independently."""
        other = object.__new__(Model)
        other.__dict__.update(self.__dict__)
        other.weights, other.states = (
            [w.copy() for w in self.weights],
            [s.copy() for s in self.states],
        )
        other.bias, other.kept = self.bias.copy(), list(self.kept)
        return other

    def train(
        self,
        data: Interactions,
        epochs: range,
        *,
        of: int,
        lr: float,
        l2: float,
        seed: int,
        batch_size: int,
        mapped: Sequence[Tensor] | None = None,
    ) -> None:
        """Train some epochs ``of`` a run, as ``two_tower.train.train`` does.

        Args:
            mapped: the rows that each user and each item looks up and adds, (ids, each) int64; None
                is its own.
        """
        tables, _held = self._tables(
            batch_size * (1 + NEGATIVES) * (1 if mapped is None else mapped[0].shape[1])
        )
        each = data.steps(batch_size)
        began = time.process_time()
        for epoch in epochs:
            for step, (user, items) in enumerate(data.epoch(seed * 1_000_003 + epoch, batch_size)):
                if self.books is not None and step % -(-each // _ASSIGNED) == 0:
                    self._assign(tables, _ROUNDS if step == 0 else 0)
                now = lr * min(1.0, 2 * (1 - (epoch * each + step) / (of * each)))
                self._step(tables, user, items, now, l2, mapped)
        self.seconds += time.process_time() - began

    def quantize(self, groups: int, seed: int) -> None:
        """Train on straight through codes of ``groups`` bytes a row: lookups return decoded rows,
        whose gradients update the float rows.

        L2 still acts on the float rows, as ``quantize(commitment=)`` makes it do.
        """
        self.books = [Books(weight, groups, seed) for weight in self.weights]

    def served(self) -> list[Floats]:
        """Return both tables as lookups return them."""
        if self.books is None:
            return self.weights
        return [book.decoded(weight) for book, weight in zip(self.books, self.weights, strict=True)]

    def _assign(self, tables: ctypes.Array[_Table], rounds: int) -> None:
        """Move the books, and let lookups return what is decoded by them."""
        assert self.books is not None
        for book, weight in zip(self.books, self.weights, strict=True):
            for _ in range(rounds):
                book.refit(weight)
        self._read = self.served()
        for table, read in zip(tables, self._read, strict=False):
            table.read = read.ctypes.data

    def _step(
        self,
        tables: ctypes.Array[_Table],
        user: Tensor,
        items: Tensor,
        lr: float,
        l2: float,
        mapped: Sequence[Tensor] | None,
    ) -> None:
        rows = (user, items) if mapped is None else (mapped[0][user], mapped[1][items])
        looked_up = [each.contiguous() for each in (*rows, items)]
        counts = [len(user), items.shape[1], 1 if mapped is None else mapped[0].shape[1]]
        _kernel().step(
            tables,
            *map(ctypes.c_long, counts),
            *(ctypes.c_void_p(each.data_ptr()) for each in looked_up),
            ctypes.c_long(self.weights[0].shape[1]),
            *map(ctypes.c_float, (self.mean_of, l2, lr)),
        )

    def _tables(self, lookups: int) -> tuple[ctypes.Array[_Table], list[object]]:
        """What the kernel takes, and the arrays that it points into."""
        found, held = [], []
        for weight, state, kept in zip(
            (*self.weights, self.bias), self.states, (*self.kept, None), strict=True
        ):
            assert weight.flags.c_contiguous and weight.dtype == np.float32
            arrays = [
                weight, weight, state, kept,
                np.zeros((lookups, weight.shape[1]), np.float32),
                np.full(len(weight), -1, np.int32),
                np.zeros(lookups, np.int64),
            ]  # fmt: skip
            held.append(arrays)
            found.append(
                _Table(*(array.ctypes.data if array is not None else None for array in arrays), 0)
            )
        return (_Table * 3)(*found), held


def rotated(weights: Sequence[Floats]) -> list[Floats]:
    """Return two tables in the balanced basis of their dot products, as
    ``rotate=[["user", "item"]]`` does."""
    user, item = (weight.astype(np.float64) for weight in weights)
    roots = [
        np.linalg.cholesky(table.T @ table + 1e-9 * np.eye(table.shape[1]))
        for table in (user, item)
    ]
    left, sizes, right = np.linalg.svd(roots[0].T @ roots[1])
    turns = [
        np.linalg.solve(root.T, of * np.sqrt(sizes))
        for root, of in zip(roots, (left, right.T), strict=True)
    ]
    return [
        np.ascontiguousarray(table @ turn, np.float32)
        for table, turn in zip((user, item), turns, strict=True)
    ]
