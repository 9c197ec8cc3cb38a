"""Checkpoint folders on any of DCP's file systems: one per step, written once, complete from the
moment it has its marker.

``step-<step>/`` has the files of DCP, ``values.json`` and, written last and by a rename, the marker
``COMMITTED``: bytes and CRC32 of every other file, and its own CRC32. A folder without a marker was
left by a save that was killed or failed. No folder is renamed, because object stores can't, and
none is written twice, because a mix of two saves would load.

No link is followed: a step folder or a file that is one is refused by name, because a deletion or a
write would reach what the link leads to. (The root itself may be a link: its user chose it.)

One rank prepares, commits and sweeps. All ranks write and read tensors, through DCP:

- Python values are JSON in a file of their own, so that no object is unpickled.
- ``.metadata`` is a pickle in a protocol that torch's weights_only unpickler can't read. So a
  restricted unpickler reads it. It allows DCP's eight classes and torch's dtypes, sizes and
  layouts. The file positions that it lists are checked against the marker.
- DCP checks neither dtypes nor that the saved pieces cover a tensor: :func:`check_saved` does,
  before DCP reads.
"""

import json
import math
import os
import pickle
import re
import stat
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import default_planner, filesystem, planner
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from dist_sparse.checks import hex_of, integer, refusing, sealed, sync_folder, unsealed
from dist_sparse.messages import cut
from dist_sparse.tables.chunked import ChunkedTensor

# The number of bytes of a file, and their CRC32.
FileFacts = tuple[int, int]

FORMAT = "dist_sparse.checkpoint"
VERSION = 1
MARKER = "COMMITTED"
VALUES = "values.json"
METADATA = ".metadata"

_STEP = re.compile(r"step-(\d{8,})")
# At most this many bytes of a marker are read: 64 MiB.
_LONGEST = 1 << 26

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}


@dataclass(frozen=True, kw_only=True)
class Marker:
    """The entries of ``COMMITTED``.

    Args:
        step: the step of the checkpoint.
        world: the number of ranks that wrote it.
        files: bytes and CRC32 of each file, by name.
    """

    step: int
    world: int
    files: Mapping[str, FileFacts]

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(length for length, _ in self.files.values())


class StepFolders:
    """The checkpoints in one folder.

    Args:
        root: the folder; a path, or an address that fsspec knows.

    Raises:
        ValueError: fsspec does not know the address, it was passed as a Path, or it is a file.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        if not isinstance(root, (str, os.PathLike)):
            raise ValueError(f"Invalid {root=}: must be a path.")
        # An address of this machine is a path: files are flushed there, and links not followed.
        given = os.fspath(root).removeprefix("file://").removeprefix("local://")
        # Pathlib makes one slash of two: the address would be a folder of this machine.
        is_path = re.match(r"[a-z][a-z0-9+]+:/(?!/)", given)
        invalid = f"Invalid root={given!r}: "
        if is_path:
            raise ValueError(f"{invalid}pass an address as a string, not as a Path.")
        if os.path.isfile(given):
            raise ValueError(f"{invalid}must be a folder, and is a file.")
        self.local = "://" not in given
        self.root = os.path.abspath(given)
        self.files: Any = filesystem.FileSystem()
        if not self.local:
            self.root = given.rstrip("/")
            try:
                from torch.distributed.checkpoint import _fsspec_filesystem

                self.files = _fsspec_filesystem.FileSystem()
                self.files.init_path(self.root)
            except (ImportError, ValueError) as error:
                raise ValueError(f"Invalid root={self.root!r}: {error}.") from None

    def path(self, step: int) -> str:
        """Return the folder of a step."""
        return f"{self.root}/step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the committed steps in ascending order.

        Raises:
            ValueError: the folder of a step is a link, or a file.
        """
        return [step for step in self._found() if self.files.exists(f"{self.path(step)}/{MARKER}")]

    def newest(self) -> int | None:
        """Return the newest committed step, if there is one.

        Warn of a newer folder without a marker, which may have been lost.

        Raises:
            ValueError: the folder is a checkpoint itself, of ``dcp.save()``.
        """
        # None would mean that training begins from the start.
        if self.files.exists(f"{self.root}/.metadata"):
            raise ValueError(
                f"{self.root} is a checkpoint that torch.distributed.checkpoint wrote without"
                " Checkpoints: load it with dcp.load()."
            )
        steps, folders = self.steps(), self._found()
        if steps[-1:] != folders[-1:]:
            warnings.warn(
                f"{self.path(folders[-1])} is newer than all checkpoints, and has no {MARKER}: its"
                " save failed, or the file was lost.",
                stacklevel=3,
            )
        return max(steps, default=None)

    def prepare(self, step: int) -> None:
        """Prepare for a save: delete the folder that an unfinished save of the same step has left.

        Raises:
            ValueError: the step or a later one is committed, or the folder of a step is a link.
        """
        # The first save creates the folder.
        self.files.mkdir(self.root)
        last = max(self.steps(), default=-1)
        if last >= step:
            raise ValueError(
                f"Invalid {step=}: {self.root} holds the checkpoint of step {last}, and steps must"
                " grow: resume from it, or save elsewhere."
            )
        self.delete(step)

    def commit(
        self, step: int, world: int, files: Mapping[str, FileFacts], values: Mapping[str, Any]
    ) -> None:
        """Write the values and then the marker, which lists them too, of a folder whose other files
        are on disk.

        Raises:
            ValueError: another save has committed the step.
            OSError: the disk fails; then there is no marker.
        """
        folder = self.path(step)
        marker = f"{folder}/{MARKER}"
        if self.files.exists(marker):
            raise ValueError(f"{folder} is complete already: another save has committed it.")
        written = self._write(f"{folder}/{VALUES}", json.dumps(values, allow_nan=False))
        # Sync first: the marker must not reach the disk before the files that it lists.
        self._sync(folder)
        entries = {
            name: {"bytes": length, "crc32": hex_of(crc)}
            for name, (length, crc) in sorted({**files, VALUES: written}.items())
        }
        head = {"format": FORMAT, "version": VERSION, "step": int(step), "world": world}
        try:
            self._write(marker, sealed({**head, "files": entries}))
            self._sync(folder)
            self._sync(self.root)
        except OSError:
            # It may be in place and not on disk. The save fails, so there must be no checkpoint.
            with suppress(OSError):
                self.files.rm_file(marker)
            raise

    def read(self, step: int) -> Marker:
        """Return the entries of the marker of a step.

        Raises:
            ValueError: it is damaged, of another version, or of another step; names the file.
        """
        path = f"{self.path(step)}/{MARKER}"
        self._refuse_irregular(path)
        files: dict[str, FileFacts] = {}
        with self._reading(path) as stream:
            # A longer marker is cut here, so its CRC32 does not match.
            entries = unsealed(stream.read(_LONGEST).decode(), FORMAT, VERSION)
            for name, file in entries["files"].items():
                # Names become paths: none may point out of the folder.
                if not re.fullmatch(r"(?!\.\.)[A-Za-z0-9_.-]+", name):
                    raise ValueError(f"{name!r} is not a file name")
                files[name] = integer("bytes", file["bytes"], least=0), int(file["crc32"], 16)
            if missing := {METADATA, VALUES} - files.keys():
                raise ValueError(f"it lists no {min(missing)}")
            if entries["step"] != step:
                raise ValueError(f"it belongs to step {entries['step']}")
            world = integer("world", entries["world"], least=1)
        return Marker(step=step, world=world, files=files)

    def verify(self, marker: Marker, names: Iterable[str]) -> None:
        """Compare the size and CRC32 of these files, and of the files that all ranks read, with the
        marker.

        Raises:
            ValueError: one is missing, damaged or not a regular file; names it.
        """
        for name in dict.fromkeys((METADATA, VALUES, *names)):
            path = f"{self.path(marker.step)}/{name}"
            wanted, crc = marker.files[name]
            try:
                self._refuse_irregular(path)
                found = _read_crc(self.files, path, most=wanted)
            except FileNotFoundError:
                raise ValueError(f"{path} is missing: {MARKER} lists it.") from None
            if found != (wanted, crc):
                raise ValueError(
                    f"{path} is damaged: it does not hold the {wanted} bytes that {MARKER} lists."
                )

    def values(self, step: int) -> dict[str, Any]:
        """Return the Python values of a checkpoint that has been verified: ``state`` and
        ``optimizer``, which are dicts, and ``extra``.

        Raises:
            ValueError: the file holds anything else; names it.
        """
        path = f"{self.path(step)}/{VALUES}"
        with self._reading(path) as stream:
            entries = json.load(stream)
            # Unpacking fails for an entry that is not a dict.
            state = {**entries["state"]}
            optimizer = {**entries["optimizer"]}
            return {"state": state, "optimizer": optimizer, "extra": entries["extra"]}

    def save_tensors(
        self, step: int, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
    ) -> dict[str, FileFacts]:
        """Write tensors through DCP. Collective over ``group``; without a group, this process
        writes alone.

        Args:
            step: the step; its folder does not exist yet, or is empty.
            tensors: the tensors by key: plain ones, which are equal on all ranks, ShardedTensors,
                DTensors, or any that DCP can write in pieces.

        Returns:
            Bytes and CRC32 of what this rank has written, by the name of the file.

        Raises:
            ValueError, OSError: on every rank, with the ranks at fault.
        """
        writer = Writer(self.path(step), self.files)
        # Keys are flat already.
        by = default_planner.DefaultSavePlanner(flatten_state_dict=False)
        with _errors_of_ranks(f"Saving to {self.path(step)}"):
            # DCP's public save() calls this too, but it warns in a process without ranks. A thread
            # can't silence that, because filters of warnings belong to the process.
            _save_state_dict(dict(tensors), writer, group, no_dist=group is None, planner=by)
        return writer.written

    def load_tensors(
        self,
        step: int,
        metadata: dcp.Metadata,
        tensors: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Read saved tensors into ``tensors``, in place. Collective over ``group``.

        Args:
            step: the step of the checkpoint.
            metadata: what :meth:`metadata` returned; the tensors have passed :func:`check_saved`.
            tensors: the tensors to read into, by key.
            group: the process group of the ranks; None for this process alone.

        Raises:
            ValueError, OSError: on every rank, with the ranks at fault. Some tensors may have been
                read.
        """
        with _errors_of_ranks(f"Loading {self.path(step)}"):
            load(
                dict(tensors),
                storage_reader=Reader(self.path(step), self.files, metadata),
                planner=default_planner.DefaultLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )

    def metadata(self, marker: Marker) -> dcp.Metadata:
        """Return what DCP has written to ``.metadata``, without running anything in it.

        Raises:
            ValueError: it holds anything other than tensors in files of the checkpoint; names the
                file.
        """
        path = f"{self.path(marker.step)}/{METADATA}"
        with self._reading(path) as stream:
            # Entries of the wrong type lack attributes that are read here.
            found: dcp.Metadata = _Unpickler(stream).load()
            tensors: dict[str, Any] = found.state_dict_metadata
            for key, saved in tensors.items():
                if not isinstance(key, str):
                    raise ValueError(f"{key!r} is not a tensor name")
                for chunk in saved.chunks:
                    spans = zip(chunk.offsets, chunk.sizes, saved.size, strict=True)
                    if not all(0 <= at <= at + length <= most for at, length, most in spans):
                        shape = tuple(saved.size)
                        raise ValueError(f"a piece of {key!r} is not in its shape {shape}")
                    place = found.storage_data[dcp.MetadataIndex(key, chunk.offsets)]
                    # A path that leads out of the folder is not one of its files.
                    length, _ = marker.files.get(place.relative_path, (-1, 0))
                    inside = 0 <= place.offset <= place.offset + place.length <= length
                    if not inside or place.transform_descriptors:
                        raise ValueError(f"{key!r} is not at a place in a file of the checkpoint")
        return found

    def sweep(self, keep: int) -> None:
        """Delete all but the last ``keep`` checkpoints, and what unfinished saves have left."""
        # Folders without a marker do not count as steps, so they are deleted too.
        kept = self.steps()[-keep:]
        for step in sorted({*self._found()} - {*kept}):
            self.delete(step)

    def discard(self, step: int) -> None:
        """Delete what a failed save of a step has written, unless another save has committed the
        step."""
        if step not in self.steps():
            self.delete(step)

    def delete(self, step: int) -> None:
        """Delete the folder of a step, if it exists. The marker goes first, so that a half-deleted
        folder is not a checkpoint.

        Raises:
            ValueError: it is a link, or a file.
        """
        folder = self.path(step)
        if not self._exists(step):
            return
        marker = f"{folder}/{MARKER}"
        if self.files.exists(marker):
            # From here on it is not a checkpoint, whenever the deletion is interrupted.
            self.files.rm_file(marker)
        # In threads: one rank deletes what all have written.
        with ThreadPoolExecutor() as threads:
            list(threads.map(self.files.rm_file, self.files.ls(folder)))
        if self.local:
            os.rmdir(folder)

    def _found(self) -> list[int]:
        if not self.files.exists(self.root):
            return []
        steps = map(step_of, self.files.ls(self.root))
        # If a step has no folder, its number is from another name, such as step-000000003.
        return sorted({step for step in steps if step is not None and self._exists(step)})

    def _exists(self, step: int) -> bool:
        """Whether the folder of a step exists.

        Raises:
            ValueError: it is a link, or a file.
        """
        folder = self.path(step)
        if not self.local:
            return bool(self.files.exists(folder))
        try:
            mode = os.lstat(folder).st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(mode):
            raise ValueError(f"{folder} is refused: it must be a folder, not a link.")
        return True

    def _write(self, path: str, text: str) -> FileFacts:
        data, unfinished = text.encode(), f"{path}.tmp"
        with _naming_errors(unfinished), self.files.create_stream(unfinished, "wb") as stream:
            stream.write(data)
            stream.flush()
            self._sync(unfinished)
        self.files.rename(unfinished, path)
        return len(data), zlib.crc32(data)

    @contextmanager
    def _reading(self, path: str) -> Iterator[Any]:
        """Open a file to read. Errors about what is in it have its name."""
        with refusing(path), self.files.create_stream(path, "rb") as stream:
            yield stream

    def _refuse_irregular(self, path: str) -> None:
        # Check before opening it: opening a pipe would block, reading a device would not end.
        if self.local and not stat.S_ISREG(os.lstat(path).st_mode):
            raise ValueError(f"{path} is refused: it must be a regular file, not a link.")

    def _sync(self, path: str) -> None:
        # Object stores have no sync.
        if self.local:
            sync_folder(path)


def _read_crc(files: Any, path: Any, most: float = math.inf) -> FileFacts:
    """Return the size of a file and its CRC32. Reading stops once there are more than ``most``
    bytes."""
    length, crc = 0, 0
    # Half a MiB stays in a core's cache for the checksum.
    part = memoryview(bytearray(1 << 19))
    with files.create_stream(path, "rb") as stream:
        while length <= most and (count := stream.readinto(part)):
            length, crc = length + count, zlib.crc32(part[:count], crc)
    return length, crc


@contextmanager
def _naming_errors(path: Any) -> Iterator[None]:
    """Raise errors of a disk with the name of the file that was written.

    The OSError of a full disk has none, and torch.save() raises an error of its own after it.
    """
    try:
        yield
    except Exception as fault:
        error: Any = fault if isinstance(fault, OSError) else fault.__context__
        if getattr(error, "filename", path) is None:
            raise OSError(error.errno, error.strerror, str(path)) from fault
        raise


def step_of(path: str | os.PathLike[str]) -> int | None:
    """Return the step in the name of a folder, None if there is none."""
    found = _STEP.fullmatch(os.path.basename(os.path.abspath(path)))
    return None if found is None else int(found[1])


# Tensors


# Bytes of pinned memory through which a device's tensors are copied.
_STAGED = 1 << 26


class Staging:
    """Copies tensors of a device to CPU memory through two pieces of pinned memory.

    Straight into pageable memory, copies run at a fraction of the bus's rate. Pinned memory for
    whole shards would take as much memory as the copies, which the system could not swap out.
    """

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy in CPU memory."""
        source = tensor.detach()
        if source.is_cpu or not source.nbytes or not source.is_contiguous():
            return source.to("cpu", copy=True)
        if not self._pieces:
            for _ in range(2):
                self._pieces.append(torch.empty(_STAGED, dtype=torch.uint8, pin_memory=True))
        found = torch.empty(source.shape, dtype=source.dtype)
        size = _STAGED // source.element_size()
        parts = zip(
            torch.split(source.view(-1), size), torch.split(found.view(-1), size), strict=True
        )
        arriving: tuple[Tensor, Tensor, Any] | None = None
        for number, (part, to) in enumerate(parts):
            piece = self._pieces[number % 2][: part.nbytes].view(part.dtype)
            piece.copy_(part, non_blocking=True)
            event = torch.get_device_module(source.device).Event()
            event.record()
            # The piece before is stored while this one arrives.
            _store(arriving)
            arriving = to, piece, event
        _store(arriving)
        return found


def _store(arriving: tuple[Tensor, Tensor, Any] | None) -> None:
    if arriving is not None:
        to, piece, event = arriving
        event.synchronize()
        to.copy_(piece)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU.

    DCP's stagers copy the whole storage of a view: here all tables of a TorchRec table batch.
    """
    found: dict[str, Tensor] = {}
    staging = Staging()
    for key, tensor in tensors.items():
        if isinstance(tensor, ShardedTensor):
            shards = [
                (tuple(shard.metadata.shard_offsets), staging.copy(shard.tensor))
                for shard in tensor.local_shards()
            ]
            found[key] = ChunkedTensor(tensor.size(), tensor.dtype, shards, ())
        else:
            found[key] = staging.copy(tensor)
    return found


def copied_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes :func:`copied` allocates."""
    total = 0
    for tensor in tensors.values():
        parts = [tensor]
        if isinstance(tensor, ShardedTensor):
            parts = [shard.tensor for shard in tensor.local_shards()]
        elif isinstance(tensor, ChunkedTensor):
            parts = [*tensor.pieces().values()]
        total += sum(part.nbytes for part in parts)
    return total


def check_saved(metadata: dcp.Metadata, tensors: Mapping[str, Tensor]) -> None:
    """Check that every one of ``tensors`` was saved, with its size and dtype, and without holes.

    Raises:
        ValueError: names the key and the rule.
    """
    for key, tensor in tensors.items():
        saved = metadata.state_dict_metadata.get(key)
        if saved is None:
            raise ValueError(f"{key!r} is not in the checkpoint.")
        assert isinstance(saved, dcp.TensorStorageMetadata)
        before = f"shape {tuple(saved.size)} and {saved.properties.dtype}"
        now = f"shape {tuple(tensor.size())} and {tensor.dtype}"
        # Chunks of one save never overlap, so that their number of elements shows a hole.
        elements = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
        holes = f"{key!r} has holes: its saved pieces do not cover the shape {tuple(saved.size)}"
        if before != now:
            raise ValueError(f"{key!r} was saved with {before}, and now has {now}.")
        if elements != math.prod(saved.size):
            raise ValueError(f"{holes} once.")


class _Unpickler(pickle.Unpickler):
    """Unpickle ``.metadata``, allowing only DCP's own classes, and torch's dtypes, sizes and
    layouts."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, (torch.dtype, torch.layout)):
            return found
        if name not in _CLASSES.get(module, ()):
            raise ValueError(f"it asks for {module}.{name}, which is not part of DCP's metadata")
        return super().find_class(module, name)


class Reader(filesystem.FileSystemReader):
    """Reader of a checkpoint whose metadata has been read and checked."""

    def __init__(self, folder: str, files: Any, metadata: dcp.Metadata) -> None:
        # DCP's constructor creates a local file system. Replace it with the root's.
        super().__init__(folder)
        self.fs = files
        self.path = files.init_path(folder)
        self._checked = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self._checked


class Writer(filesystem.FileSystemWriter):
    """Writer that hashes each file once it is written. An error of a rank is raised by DCP on
    all."""

    def __init__(self, folder: str, files: Any) -> None:
        super().__init__(folder)
        self.fs, self.path = files, files.init_path(folder)
        self.written: dict[str, FileFacts] = {}

    def storage_meta(self) -> dcp.StorageMeta:
        # DCP's own metadata would store a path of this machine.
        return dcp.StorageMeta()

    def write_data(self, plan: planner.SavePlan, by: planner.SavePlanner) -> Any:
        # DCP writes one file on each rank, even without tensors.
        with self._hashing(f"{plan.storage_data.prefix}0{filesystem.DEFAULT_SUFFIX}"):
            return super().write_data(plan, by)

    def finish(self, metadata: dcp.Metadata, results: Any) -> None:
        with self._hashing(METADATA):
            super().finish(metadata, results)

    @contextmanager
    def _hashing(self, name: str) -> Iterator[None]:
        path = self.fs.concat_path(self.path, name)
        with _naming_errors(path):
            yield
            self.written[name] = _read_crc(self.fs, path)


@contextmanager
def _errors_of_ranks(action: str) -> Iterator[None]:
    """Raise errors of ranks as an OSError or a ValueError: DCP's own exception passes ``except
    Exception``."""
    try:
        yield
    except CheckpointException as fault:
        failures = sorted(fault.failures.items())
        text = " | ".join(
            f"rank {rank}: {type(error).__name__}: {cut(str(error))}"
            for rank, (error, _) in failures
        )
        _, (first, _) = failures[0]
        kind: type[Exception] = OSError if isinstance(first, OSError) else ValueError
        raise kind(f"{action} failed. {text}") from None
