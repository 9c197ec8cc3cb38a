"""Checkpoints of a training in one call, saved completely or not at all, verified before they are
read, for any number of ranks.

Order of a save: collect on all ranks, write tensors through DCP, hash the files, write the marker,
delete old folders. Order of a resume: verify every byte, check that each entry has an owner, read
masks into copies and check all parts, then read weights and optimizer state in place, and replace
everything else. An error of one rank is raised on all ranks, before the marker is written or before
anything changes.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections import ChainMap
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse import checks
from dist_sparse.checkpoint.host_memory import refuse_without_memory
from dist_sparse.checkpoint.state import (
    NamedTensors,
    OptimizerState,
    as_json,
    filled,
    gathered,
    quiet,
    split,
)
from dist_sparse.groups import Group, world_group, world_rank
from dist_sparse.messages import cut
from dist_sparse.optimizers import Optimizers
from dist_sparse.tables.chunked import ChunkedTensor
from dist_sparse.tables.modules import check_module
from dist_sparse.text import number_of, size, table_lines

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from dist_sparse.checkpoint.storage import FileFacts

    # An object with masks and schedules, or a dict of several.
    Sparse = Stateful | Mapping[str, Stateful] | None

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The result of :meth:`Checkpoints.resume_latest`.

    Args:
        step: the step of the checkpoint.
        extra: what was passed to ``save``.
        path: the folder of the checkpoint.
        rng: whether the states of torch's random number generators were restored: on as many ranks
            as saved them.
        merged: optimizer state that was merged because its table is now cut into different columns.
    """

    step: int
    extra: checks.Json
    path: str
    rng: bool
    merged: tuple[str, ...] = ()


class Checkpoints:
    """Checkpoints of one training, in one folder.

    Args:
        root: the folder: a path that all ranks share, or an address that fsspec knows
            (``"s3://..."``).
        keep: how many to keep. Older ones are deleted once a new one is whole.
        every: steps between checkpoints: :meth:`save` does nothing at others.

    Raises:
        ValueError: an argument is invalid.

    Example::

        >>> import tempfile, torch
        >>> from dist_sparse import Checkpoints, sparsify
        >>> def train(root, steps):
        ...     model = torch.nn.EmbeddingBag(100, 8)
        ...     optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        ...     parts = {"model": model, "optimizer": optimizer}
        ...     checkpoints = Checkpoints(root, every=2)
        ...     resumed = checkpoints.resume_latest(**parts)
        ...     for step in range(resumed.step if resumed else 0, steps):
        ...         optimizer.zero_grad()
        ...         model(torch.arange(10).view(2, 5) * step % 100).sum().backward()
        ...         optimizer.step()
        ...         checkpoints.save(step + 1, **parts, extra={"epoch": 0})
        ...     return resumed.step if resumed else None
        >>> with tempfile.TemporaryDirectory() as root:
        ...     train(root, steps=5), train(root, steps=9)
        (None, 4)
    """

    # The write that save_async() has begun. All objects share it, because they share the process
    # group that it sends through.
    writing: ClassVar[Future[None] | None] = None
    _thread = ThreadPoolExecutor(1, "checkpoint")

    def __init__(self, root: str | os.PathLike[str], *, keep: int = 3, every: int = 1) -> None:
        self.keep = checks.integer("keep", keep, least=1)
        self.every = checks.integer("every", every, least=1)
        # Not at the top: it loads DCP, which torch itself does not.
        from dist_sparse.checkpoint.storage import StepFolders

        self._folders = StepFolders(root)

    @property
    def root(self) -> str:
        """The folder, as an absolute path or an address."""
        return self._folders.root

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in ascending order. Local."""
        return self._folders.steps()

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        sparse: Sparse = None,
        extra: checks.Json = None,
        force: bool = False,
    ) -> bool:
        """Save a checkpoint. Collective; local at steps where nothing is saved.

        Args:
            step: number of steps done, the same on every rank. With a pipeline, count the calls of
                ``pipeline.progress()``: they give the position in the data, since the pipeline's
                reader runs ahead. If ``every`` is more than 1, a rank whose step saves nothing does
                not learn that other ranks save.
            model: plain, under DDP, or a DistributedModelParallel.
            optimizer: one of torch or TorchRec, or a list of them.
            sparse: a :class:`~dist_sparse.SparseTraining`, a sparsifier, or several objects by
                name.
            extra: values that :meth:`resume_latest` returns, such as the state of a learning rate
                scheduler: what JSON gives back, the same on every rank.
            force: save even at a step that is not a multiple of ``every``.

        Returns:
            Whether it was saved.

        Raises:
            ValueError, OSError: on every rank, with the ranks at fault. There is no new checkpoint;
                the others are unchanged. If ``every`` is more than 1, an invalid step is an error
                of its rank alone.
        """
        if not self._due(step, force):
            return False
        state = self._collected(step, model, optimizer, sparse, extra)
        # _write() itself is not quiet: save_async() runs it in a thread, and filters of warnings
        # apply to all threads.
        with quiet():
            self._write(step, *state)
        return True

    def save_async(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        sparse: Sparse = None,
        extra: checks.Json = None,
        force: bool = False,
    ) -> bool:
        """Like :meth:`save`, but return once everything is copied to CPU memory, and write it in a
        thread. Collective.

        The next save waits for it, and raises its error, if any, as :meth:`wait` does. Call
        ``wait`` at the end. So a rank never holds more than one copy of its part of a checkpoint.

        Raises:
            ValueError: as :meth:`save`; and if the copies of the ranks of a machine are larger than
                its available memory (Linux's ``MemAvailable``, and the limits of control groups).
                On every rank, before anything is copied.
        """
        if not self._due(step, force):
            return False
        state = self._collected(step, model, optimizer, sparse, extra, staged=True)
        Checkpoints.writing = self._thread.submit(self._write, step, *state)
        return True

    def wait(self) -> None:
        """Wait until the write of :meth:`save_async` is complete; raise its error, if any. Local:
        call it on every rank, because it raises an error once."""
        writing = self.writing
        if writing is None:
            return
        try:
            writing.result()
        finally:
            # An error is raised once. After an interrupt, the thread still writes.
            if writing.done():
                Checkpoints.writing = None

    def resume_latest(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        sparse: Sparse = None,
        row_wise_state: Literal["refuse", "merge"] = "refuse",
    ) -> Resumed | None:
        """Load the newest checkpoint, if there is one. Collective.

        Args:
            model, optimizer, sparse: as in :meth:`save`; the sharding may differ.
            row_wise_state: what to do with the row-wise optimizer state of a table that is now cut
                into different columns: ``"merge"`` takes means
                (:func:`~dist_sparse.checkpoint.state.merging`), and reports it.

        Returns:
            What was loaded; None if there is no checkpoint.

        Raises:
            ValueError, OSError: on every rank: a file is damaged or missing, an entry has no owner
                here, an owner has no entry, shapes differ, or a part of ``sparse`` refuses its
                state. Nothing has changed, unless the disk fails while weights are read, or the
                model's own ``set_extra_state()`` fails after that.
        """
        group = self._group()
        with group.agreeing("resume_latest()") as facts:
            # Inside: the write of one rank alone may have failed.
            self.wait()
            kinds = ("refuse", "merge")
            merge = checks.choice("row_wise_state", row_wise_state, kinds) == "merge"
            facts["root"] = self.root
            newest = self._folders.newest() if group.rank == 0 else None
        # Only rank 0 lists the folder: on a shared file system, listings of ranks may differ.
        step = group.all_gather_json(newest)[0]
        return None if step is None else self._load(step, model, optimizer, sparse, merge)

    def _due(self, step: int, force: bool) -> bool:
        if force or self.every == 1:
            # All ranks save: the agreement in _collected() refuses an invalid step on all of them.
            return True
        # Other ranks may have nothing to save, and would not come to an agreement.
        return checks.integer("step", step, least=0) % self.every == 0

    def _group(self) -> Group:
        """The world as a group of its own: DCP may communicate in a thread beside the training."""
        return world_group(apart="checkpoints")

    @quiet()
    def _collected(
        self,
        step: int,
        model: nn.Module,
        optimizer: Any,
        sparse: Any,
        extra: checks.Json,
        staged: bool = False,
    ) -> tuple[NamedTensors, dict[str, checks.Json], checks.Json]:
        """Wait for the previous save; return the tensors, values and optimizer state of this
        rank."""
        group = self._group()
        with group.agreeing("save()") as facts:
            # Inside: the write of one rank alone may have failed.
            self.wait()
            checks.integer("step", step, least=0)
            # A copy: save_async() writes it later.
            extra = as_json("extra", extra)
            parts = _parts(sparse)
            facts.update(step=step, root=self.root, extra=extra, sparse=list(parts))
            model = _inner(model)
            tensors, values = split({"model": model.state_dict()})
            optimizers = OptimizerState(optimizer, model)
            described = optimizers.described()
        states = _states(parts, "save()", group)
        with group.agreeing("save()") as facts:
            masks, others = split(states)
            values |= others
            facts["values"] = values
            tensors = {**tensors, **optimizers.tensors, **_rng(), **masks}
        if staged:
            tensors = self._copied(tensors, group)
        return tensors, {"state": values, "extra": extra}, described

    def _copied(self, tensors: NamedTensors, group: Group) -> NamedTensors:
        """Return copies in CPU memory, if all machines have enough of it. Collective."""
        from dist_sparse.checkpoint.storage import copied, copied_bytes

        remedy = "Call save(), which copies at most one tensor at a time."
        refuse_without_memory("save_async()", remedy, copied_bytes(tensors), group)
        with group.agreeing("save_async()"):
            # Starts the thread, if there is none: the write must not fail to start on one rank.
            self._thread.submit(int)
            return copied(tensors)

    def _write(
        self,
        step: int,
        tensors: NamedTensors,
        values: dict[str, checks.Json],
        described: checks.Json,
    ) -> None:
        group, folders = self._group(), self._folders
        with group.agreeing("save()"):
            if group.rank == 0:
                folders.prepare(step)
        # Gather it: no rank holds all parameters, and one file describes them all.
        values["optimizer"] = gathered(group.all_gather_json(described))
        try:
            written = folders.save_tensors(step, tensors, group.process_group)
            # The all-gather is also the barrier: now every rank has written and hashed its files.
            files: dict[str, FileFacts] = dict(ChainMap(*group.all_gather_json(written)))
            with group.agreeing("save()"):
                if group.rank == 0:
                    folders.commit(step, group.size, files, values)
        except Exception:
            # The error is raised on all ranks, so none is still writing.
            if group.rank == 0:
                with contextlib.suppress(OSError, ValueError):
                    folders.discard(step)
            raise
        if group.rank == 0:
            try:
                folders.sweep(self.keep)
            except Exception as error:
                # The new checkpoint is complete, and the next save sweeps again. Not a warning: it
                # may be an error, which would end this rank alone.
                _log.warning("Old checkpoints can't be deleted: %s.", error)

    @quiet()
    def _load(
        self, step: int, model: nn.Module, optimizer: Any, sparse: Any, merge: bool
    ) -> Resumed:
        from dist_sparse.checkpoint.storage import check_saved

        group, folders = self._group(), self._folders
        with group.agreeing("resume_latest()") as facts:
            marker = folders.read(step)
            # Each rank verifies a share of the files, dealt by size, and those that all ranks read.
            largest = sorted(marker.files, key=lambda name: (-marker.files[name][0], name))
            folders.verify(marker, largest[group.rank :: group.size])
            metadata = folders.metadata(marker)
            values = folders.values(step)
            model = _inner(model)
            tree = model.state_dict()
            parts = _parts(sparse)
            facts["sparse"] = list(parts)
        trees = _states(parts, "resume_latest()", group)
        with group.agreeing("resume_latest()"):
            weights, held = split({"model": tree})
            masks, others = split(trees)
            held |= others
            if missing := sorted(held.keys() - values["state"].keys()):
                raise ValueError(f"{missing[0]!r} is not in the checkpoint.")
            _refuse_unclaimed(sorted(values["state"].keys() - held.keys()))
            optimizers = OptimizerState(optimizer, model)
            saved = metadata.state_dict_metadata
            states, changes, merged = optimizers.prepare_load(saved, values["optimizer"], merge)
            # Each rank has its generator states: they fit only the same number of ranks.
            random = _rng() if marker.world == group.size else {}
            # A checkpoint from a machine without CUDA has no CUDA generator states.
            random = {key: random[key] for key in random.keys() & saved}
            # Some parts have live tensors in their states, which must not change before all parts
            # are checked.
            read = {**{key: _unshared(mask) for key, mask in masks.items()}, **random}
            rest = {**weights, **states}
            tensors = {**read, **rest}
            check_saved(metadata, tensors)
        # If there are fewer ranks than before, some generator states have no owner.
        keys = sorted(saved)
        claims = [key in tensors or key.startswith("rng.") for key in keys]
        counts = group.all_reduce(torch.tensor(claims, dtype=torch.int64)).tolist()
        _refuse_unclaimed([key for key, count in zip(keys, counts, strict=True) if count == 0])
        folders.load_tensors(step, metadata, read, group.process_group)
        with group.agreeing("resume_latest()"):
            found = {**values["state"], **read}
            loads = {key: filled(trees[key], key, found) for key in parts}
            # Tensors are read in place. load_state_dict() sets the model's Python values.
            tree.update(filled(tree, "model", values["state"]))
            generators = _generators(random)
        commits = _prepared(parts, trees, loads, group)
        folders.load_tensors(step, metadata, rest, group.process_group)
        commits += [partial(model.load_state_dict, tree), *changes, *generators]
        return Resumed(
            step=step,
            extra=values["extra"],
            path=folders.path(step),
            rng=bool(random),
            merged=self._replace_parts(step, commits, merged),
        )

    def _replace_parts(
        self, step: int, commits: list[Callable[[], object]], merged: list[str]
    ) -> tuple[str, ...]:
        """Replace everything that is not read in place. Return the merged state over all ranks.
        Collective."""
        group = self._group()
        error: Exception | None = None
        text = ""
        try:
            for commit in commits:
                commit()
        except Exception as fault:
            # Only the model's own code is left that can fail. The other ranks must learn of it.
            error = fault
            text = f"{type(error).__name__}: {cut(str(error))}"
        # A rank reports merges only of the tables that it holds.
        merges, errors = zip(*group.all_gather_json([merged, text]), strict=True)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
        if failed:
            raise ValueError(
                f"Loading {self._folders.path(step)} failed after its weights were read: the"
                f" training is loaded in part. {' | '.join(failed)}"
            ) from error
        return tuple(sorted(set().union(*merges)))


# The modules that have random generators, by the kind of device.
_RANDOM: dict[str, Any] = {"cpu": torch, "cuda": torch.cuda}


def _inner(model: nn.Module) -> nn.Module:
    """Return the model without DDP, which puts ``module.`` before every name.

    Raises:
        ValueError: it is not a module.
    """
    check_module(model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def _parts(sparse: Any) -> dict[str, Stateful]:
    """Return the objects passed as ``sparse``, by the key of their state."""
    named = sparse if isinstance(sparse, Mapping) else {"": sparse}
    parts: dict[str, Stateful] = {}
    for name, part in named.items():
        if hasattr(part, "load_state_dict"):
            parts[f"sparse.{name}".rstrip(".")] = part
        elif part is not None:
            raise ValueError(
                f"Invalid sparse of type {type(part).__name__}: must be what sparsify() returns, a"
                " sparsifier, or a dict of objects with state_dict()."
            )
    return parts


def _states(parts: Mapping[str, Stateful], action: str, group: Group) -> dict[str, Any]:
    """Return the states of parts, by key. Collective."""
    states = {}
    for key, part in parts.items():
        # One agreement for each part: a state may be collective in some shardings, and a rank that
        # has failed must not leave the others waiting in the next part's.
        with group.agreeing(action):
            states[key] = part.state_dict()
    return states


def _unshared(tensor: Tensor) -> Tensor:
    """Return a tensor to load into in place of one from a state, whose values stay as they are."""
    detached = tensor.detach()
    # It holds what is loaded beside what was saved: nothing need be copied.
    return detached if isinstance(detached, ChunkedTensor) else detached.clone()


def _prepared(
    parts: Mapping[str, Stateful], before: Mapping[str, Any], loads: Mapping[str, Any], group: Group
) -> list[Callable[[], object]]:
    """Check the states of all parts on all ranks, and return the local functions that load them.
    Collective.

    Objects that can't check a state without loading it, such as learning rate schedulers, load it
    here. If any part is refused, their previous state is restored.

    Raises:
        ValueError: on every rank; nothing has changed.
    """
    commits = []
    with contextlib.ExitStack() as restore:
        for key, part in parts.items():
            with group.agreeing("resume_latest()"):
                if hasattr(part, "prepare_load"):
                    commits.append(part.prepare_load(loads[key]))
                else:
                    restore.callback(_restore, part, copy.deepcopy(before[key]))
                    part.load_state_dict(loads[key])
        restore.pop_all()
    return commits


def _rng() -> NamedTensors:
    """Return the state of this rank's random number generators."""
    rank = world_rank()
    found = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        found[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
    return found


def _generators(states: NamedTensors) -> list[Callable[[], object]]:
    """Return the functions that set the generators of :func:`_rng`.

    Raises:
        RuntimeError, TypeError: a tensor is not a generator's state.
    """
    commits: list[Callable[[], object]] = []
    for key, state in states.items():
        kind = key.split(".")[1]
        # Try a new generator first: it refuses what the generator in use would refuse later.
        torch.Generator(kind).set_state(state)
        commits.append(partial(_RANDOM[kind].set_rng_state, state))
    return commits


def _refuse_unclaimed(keys: list[str]) -> None:
    if keys:
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        raise ValueError(
            f"{keys[0]!r}{more} of the checkpoint would be dropped: pass what was saved, with the"
            " same tables, layers and optimizers."
        )


def _restore(part: Stateful, state: Any) -> None:
    # An object that refuses its own state must not hide the error that all ranks raise.
    with contextlib.suppress(Exception):
        part.load_state_dict(state)


def checkpoint_summary(path: str | os.PathLike[str]) -> str:
    """Return the contents of the folder of one step, or of a folder of such folders, as text.
    Local; needs no model.

    Raises:
        ValueError: there is no checkpoint, or a file is missing or damaged; names it. If there are
            several checkpoints, only their markers are read.
    """
    from dist_sparse.checkpoint.storage import StepFolders, step_of

    step = step_of(path)
    if step is None:
        folders = StepFolders(path)
        markers = map(folders.read, folders.steps())
        rows = [(str(each.step), str(each.world), size(each.bytes)) for each in markers]
        lines = table_lines(("step", "ranks", "size"), rows, right={0, 1, 2})
        return "\n".join([folders.root, *lines])
    folders = StepFolders(os.path.dirname(os.path.abspath(path)))
    if step not in folders.steps():
        raise ValueError(
            f"{folders.root} holds no checkpoint of step {step}; a folder without its marker is of"
            " an unfinished save."
        )
    marker = folders.read(step)
    # Every byte is verified before anything is shown.
    folders.verify(marker, marker.files)
    tensors: dict[str, Any] = folders.metadata(marker).state_dict_metadata
    rows = [
        (key, " x ".join(map(str, saved.size)), str(saved.properties.dtype))
        for key, saved in sorted(tensors.items())
    ]
    head = f"step {step}, saved by {number_of(marker.world, 'rank')}, {size(marker.bytes)}: whole"
    lines = table_lines(("tensor", "shape", "dtype"), rows)
    return "\n".join([folders.path(step), head, "", *lines])
