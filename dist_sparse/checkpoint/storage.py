"""DCP's writer and reader with a CRC32 of every file, without pickled objects, and with errors that
name rank and file.

- Tensors alone are written through DCP: Python values are JSON in a file beside them, so that no
  object is unpickled.
- ``.metadata`` is a pickle, of a protocol that torch's weights_only unpickler can't read. So one
  of our own reads it, which knows DCP's eight classes, and dtypes, sizes and layouts of torch. The
  places in files that it lists are checked against the marker.
- DCP compares no dtypes, nor whether the saved pieces cover a tensor: :func:`check_saved` does,
  before DCP reads.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import default_planner, filesystem, planner
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.tensor import DTensor

from dist_sparse.checkpoint.folders import Entry, naming_errors, read_crc
from dist_sparse.groups import cut
from dist_sparse.tables.chunked import ChunkedTensor

METADATA: Final = ".metadata"

_OF_METADATA: Final = (
    "Metadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_CLASSES: Final = {
    **dict.fromkeys(_OF_METADATA, "torch.distributed.checkpoint.metadata"),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",
}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU.

    DCP's stagers copy the whole storage of a view: here all tables of a TorchRec table batch.
    """
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, ShardedTensor):
            shards = [
                (tuple(shard.metadata.shard_offsets), shard.tensor.detach().to("cpu", copy=True))
                for shard in tensor.local_shards()
            ]
            found[key] = ChunkedTensor(tensor.size(), tensor.dtype, shards, ())
        elif isinstance(tensor, DTensor):
            found |= BlockingAsyncStager().stage({key: tensor})
        elif isinstance(tensor, ChunkedTensor):
            # Masks are saved from copies already.
            found[key] = tensor
        else:
            found[key] = tensor.detach().to("cpu", copy=True)
    return found


def save_tensors(
    files: Any, folder: str, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Entry]:
    """Write tensors through DCP. Collective over ``group``; without one by this process alone.

    Args:
        files: the file system.
        folder: that does not exist yet, or is empty.
        tensors: by key: plain ones, which the ranks hold in common, ShardedTensors, DTensors, or
            any that DCP knows to write in pieces.

    Returns:
        Bytes and CRC32 of what this rank has written, by the name of the file.

    Raises:
        ValueError, OSError: on every rank, with the ranks at fault.
    """
    writer = _Writer(folder, files)
    # Keys are flat already.
    by = default_planner.DefaultSavePlanner(flatten_state_dict=False)
    with _errors_of_ranks(f"Saving to {folder}"):
        # What DCP's save() calls. That one warns in a process without ranks, and a thread can't
        # silence it: filters of warnings belong to the process.
        _save_state_dict(dict(tensors), writer, group, no_dist=group is None, planner=by)
    return writer.written


def load_tensors(
    files: Any,
    folder: str,
    metadata: dcp.Metadata,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Read saved tensors into ``tensors``, in place. Collective over ``group``.

    Args:
        metadata: from :func:`read_metadata`; the tensors have passed :func:`check_saved`.

    Raises:
        ValueError, OSError: on every rank, with the ranks at fault. Some tensors may have been
            read.
    """
    with _errors_of_ranks(f"Loading {folder}"):
        load(
            dict(tensors),
            storage_reader=_Reader(folder, files, metadata),
            planner=default_planner.DefaultLoadPlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )


def read_metadata(files: Any, folder: str, sizes: Mapping[str, int]) -> dcp.Metadata:
    """Return what DCP has written to ``.metadata``, without running anything in it.

    Args:
        sizes: bytes of the files of the checkpoint, by name.

    Raises:
        ValueError: it holds anything else than tensors in those files; names the file.
    """
    path = files.concat_path(folder, METADATA)
    try:
        with files.create_stream(path, "rb") as stream:
            return _checked_metadata(_Unpickler(stream).load(), sizes)
    except OSError:
        raise
    except Exception as error:  # a pickle of another shape fails in any way
        raise ValueError(
            f"{path} is refused: {cut(str(error) or type(error).__name__, 300)}."
        ) from None


def _checked_metadata(found: object, sizes: Mapping[str, int]) -> dcp.Metadata:
    """``found``, unless it lists anything but tensors in the files of the checkpoint."""
    if type(found) is not dcp.Metadata or not isinstance(found.storage_data, dict):
        raise ValueError(f"it holds {type(found).__name__}, not DCP's metadata")
    for key, saved in found.state_dict_metadata.items():
        if not isinstance(key, str) or type(saved) is not dcp.TensorStorageMetadata:
            raise ValueError(f"{key!r} is no tensor, and objects are not unpickled")
        for chunk in saved.chunks:
            place = found.storage_data[dcp.MetadataIndex(key, chunk.offsets)]
            # A path that leads out of the folder is none of its files.
            size = sizes.get(place.relative_path, -1)
            inside = 0 <= place.offset <= place.offset + place.length <= size
            if not inside or place.transform_descriptors:
                raise ValueError(f"{key!r} is not at a place in a file of the checkpoint")
    return found


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
        if saved.size != tensor.size() or saved.properties.dtype != tensor.dtype:
            raise ValueError(
                f"{key!r} was saved with shape {tuple(saved.size)} and {saved.properties.dtype},"
                f" and is of shape {tuple(tensor.size())} and {tensor.dtype} now."
            )
        # Chunks of one save never overlap, so that their number of elements shows a hole.
        elements = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
        inside = all(_is_within(chunk, saved.size) for chunk in saved.chunks)
        if not inside or elements != math.prod(saved.size):
            raise ValueError(
                f"{key!r} has holes: its saved pieces do not cover the shape {tuple(saved.size)}"
                " once."
            )


def _is_within(chunk: dcp.ChunkStorageMetadata, size: torch.Size) -> bool:
    return all(
        0 <= start <= start + length <= whole
        for start, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )


class _Unpickler(pickle.Unpickler):
    """Unpickle ``.metadata`` without any class but DCP's of it, and torch's dtypes, sizes and
    layouts."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, (torch.dtype, torch.layout)):
            return found
        if _CLASSES.get(name) != module:
            raise ValueError(f"it asks for {module}.{name}, which is no part of DCP's metadata")
        return super().find_class(module, name)


class _Reader(filesystem.FileSystemReader):
    """Reader of a checkpoint whose metadata has been read and checked."""

    def __init__(self, folder: str, files: Any, metadata: dcp.Metadata) -> None:
        # DCP makes a local file system of any folder: replaced by the one of the root.
        super().__init__(folder)
        self.fs, self.path, self._checked = files, files.init_path(folder), metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self._checked


class _Writer(filesystem.FileSystemWriter):
    """Writer that hashes each file once it is written. An error of a rank is raised by DCP on
    all."""

    def __init__(self, folder: str, files: Any) -> None:
        super().__init__(folder)
        self.fs, self.path = files, files.init_path(folder)
        self.written: dict[str, Entry] = {}

    def storage_meta(self) -> dcp.StorageMeta:
        # DCP's own holds a path of this machine.
        return dcp.StorageMeta()

    def write_data(self, plan: planner.SavePlan, by: planner.SavePlanner) -> Any:
        # DCP writes one file on each rank, even of no tensors.
        with self._hashing(f"{plan.storage_data.prefix}0{filesystem.DEFAULT_SUFFIX}"):
            return super().write_data(plan, by)

    def finish(self, metadata: dcp.Metadata, results: Any) -> None:
        with self._hashing(METADATA):
            super().finish(metadata, results)

    @contextmanager
    def _hashing(self, name: str) -> Iterator[None]:
        path = self.fs.concat_path(self.path, name)
        with naming_errors(path):
            yield
            self.written[name] = read_crc(self.fs, path)


@contextmanager
def _errors_of_ranks(action: str) -> Iterator[None]:
    """Raise errors of ranks as an OSError or a ValueError: DCP's own exception passes ``except
    Exception``."""
    try:
        yield
    except CheckpointException as fault:
        faults = [(rank, error) for rank, (error, _) in sorted(fault.failures.items())]
        text = " | ".join(
            f"rank {rank}: {type(error).__name__}: {cut(str(error))}" for rank, error in faults
        )
        kind: type[Exception] = OSError if isinstance(faults[0][1], OSError) else ValueError
        raise kind(f"{action} failed. {text}") from None
