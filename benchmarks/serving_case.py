"""One case of ``benchmarks/serving.py``, in a process of its own:
``python -m benchmarks.serving_case JSON``."""

from __future__ import annotations

import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse import DataNormSparsifier, export, load_served

__all__ = ["load", "lookups", "main", "many", "targets", "write"]

Call = Callable[[Tensor, Tensor], object]


def main() -> int:
    """Runs the case given as JSON and prints what it found as JSON."""
    case = json.loads(sys.argv[1])
    torch.manual_seed(0)
    kinds = {
        "lookups": lookups,
        "many": many,
        "targets": targets,
        "write": write,
        "load": load,
    }
    print(json.dumps({**case, **kinds[case["kind"]](case)}))
    return 0


def lookups(case: dict[str, Any]) -> dict[str, Any]:
    """Bags of one table: the dense table and FBGEMM's remaps beside the artifact, on the same fresh
    ids."""
    rows, dim, dtype = case["rows"], case["dim"], case["dtype"]
    map_bytes = _map_bytes(case)
    frequency = _frequency(case)
    weight = torch.randn(rows, dim) * (
        1.0 if frequency is None else frequency.sqrt().float().unsqueeze(1)
    )
    table = nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True)
    with tempfile.TemporaryDirectory() as folder:
        kept, bytes_ = _write(table, case, Path(folder) / "served")
        served = load_served(Path(folder) / "served")
        plain = load_served(Path(folder) / "served", fbgemm=False) if dtype == "fp32" else None
    remap = torch.where(kept, kept.cumsum(0) - 1, -1).int()
    calls: dict[str, Call] = {"served": served, "tbe": _tbe(case, rows, None, True)}
    if plain is not None:
        calls |= {"served in torch": plain, "nn.EmbeddingBag": table}
    if not bool(kept.all()):
        calls["array"] = _tbe(case, int(kept.sum()), remap, True)
        calls["map"] = _tbe(case, int(kept.sum()), remap, False)
        calls["index"] = lambda ids, offsets: served.lookup.index(ids, offsets)
    offsets = torch.arange(0, case["bags"] * case["ids_a_bag"] + 1, case["ids_a_bag"])
    times = _interleaved(calls, lambda: (_ids(case, rows, frequency), offsets), case["rounds"])
    return {
        "times_s": times,
        "file_bytes": bytes_,
        "dense_bytes": weight.nbytes,
        # FBGEMM casts it to the dtype of the ids, int64.
        "array_bytes": remap.long().nbytes,
        "index_bytes": 0 if bool(kept.all()) else -(-rows // 32) * 8,
        "map_bytes": map_bytes,
    }


def many(case: dict[str, Any]) -> dict[str, Any]:
    """Many tables of TorchRec, through a KeyedJaggedTensor: its float and its quantized
    collection."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.inference.modules import quantize_inference_model

    names = [f"f{at}" for at in range(case["tables"])]
    configs = [
        EmbeddingBagConfig(
            name=f"t{at}",
            num_embeddings=case["rows"],
            embedding_dim=case["dim"],
            feature_names=[name],
        )
        for at, name in enumerate(names)
    ]
    model = nn.ModuleDict({"sparse": EmbeddingBagCollection(tables=configs)})
    with tempfile.TemporaryDirectory() as folder:
        _write(model, case, Path(folder) / "served")
        calls: dict[str, Any] = {"served": load_served(Path(folder) / "served")}
    if case["dtype"] == "fp32":
        calls["EmbeddingBagCollection"] = model["sparse"]
    else:
        calls["quantized"] = quantize_inference_model(model, quantization_dtype=torch.int8)[
            "sparse"
        ]
    lengths = torch.full((case["tables"] * case["bags"],), case["ids_a_bag"])

    def drawn() -> tuple[Any, ...]:
        return (
            KeyedJaggedTensor(
                names, torch.randint(case["rows"], (int(lengths.sum()),)), lengths=lengths
            ),
        )

    return {"times_s": _interleaved(calls, drawn, case["rounds"])}


def targets(case: dict[str, Any]) -> dict[str, Any]:
    """One table of TorchRec in every stored form, through every module that can look it up."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    config = EmbeddingBagConfig(
        name="t", num_embeddings=case["rows"], embedding_dim=case["dim"], feature_names=["f"]
    )
    model = EmbeddingBagCollection([config])
    dtype, _, scale = case["form"].partition("/")
    sparsifier = DataNormSparsifier(
        sparsity_level=case["removed"], sparse_block_shape="row", norm="L2"
    )
    sparsifier.add_model(model)
    sparsifier.step()
    sparse: Any = sparsifier
    if dtype == "codes":
        from dist_sparse.extras.codes import quantize

        sparse = quantize(model, [], codes=case["dim"] // 4, begin=0, sparse=sparsifier)
        sparse.step()
    bags = case["bags"]
    offsets = torch.arange(0, bags * case["ids_a_bag"] + 1, case["ids_a_bag"])
    lengths = offsets.diff()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "served"
        export(model, sparse, path, dtype, scale or "row")
        served, plain = load_served(path), load_served(path, fbgemm=False)
        fbgemm, torchrec = served.to_fbgemm(), served.to_torchrec()
        calls: dict[str, Any] = {
            "load_served": lambda ids: served(ids, lengths),
            "load_served, torch alone": lambda ids: plain(ids, lengths),
            "to_fbgemm": lambda ids: fbgemm(ids, offsets),
            "to_torchrec": lambda ids: torchrec(KeyedJaggedTensor(["f"], ids, lengths=lengths)),
        }
        for name, module in (("to_pt2", served), ("to_pt2, torch alone", plain)):
            file = Path(folder) / "saved.pt2"
            module.to_pt2(file)
            program = torch.export.load(file)
            calls[name] = partial(_look_up, program.module(), lengths)
            if case["compiled"]:
                package = str(Path(folder) / f"{name}.pt2")
                torch._inductor.aoti_compile_and_package(program, package_path=package)
                compiled = torch._inductor.aoti_load_package(package)
                calls[f"{name}, AOTInductor"] = partial(_look_up, compiled, lengths)
    with torch.no_grad():
        times = _interleaved(
            calls,
            lambda: (torch.randint(case["rows"], (len(lengths) * case["ids_a_bag"],)),),
            case["rounds"],
        )
    return {"times_s": times}


def _look_up(module: Any, lengths: Tensor, ids: Tensor) -> object:
    return module(ids, lengths)


def write(case: dict[str, Any]) -> dict[str, Any]:
    """Writes the dense model's state and artifacts of it into a folder, for :func:`load`."""
    folder = Path(case["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model = nn.EmbeddingBag(case["rows"], case["dim"], mode="sum")
    found = {}
    for dtype in ("fp32", "int8"):
        _, found[dtype] = _write(model, {**case, "dtype": dtype}, folder / dtype)
    torch.save(model.state_dict(), folder / "dense")
    return {"file_bytes": {**found, "dense": (folder / "dense").stat().st_size}}


def load(case: dict[str, Any]) -> dict[str, Any]:
    """Loads what :func:`write` wrote: seconds, and resident memory afterwards above that before.
    The file is cached."""
    file = Path(case["folder"]) / case["what"]
    ids, offsets = torch.randint(case["rows"], (5120,)), torch.arange(0, 5120, 10)
    # Imports, threads and allocator are not part of what is measured.
    import fbgemm_gpu  # noqa: F401
    import safetensors.torch  # noqa: F401

    nn.EmbeddingBag(10, 4, mode="sum")(ids % 10, offsets)
    torch.save(ids, buffer := io.BytesIO())
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    before, start = _resident(), time.perf_counter()
    if case["what"] == "dense":
        module: Any = nn.EmbeddingBag.from_pretrained(
            torch.load(file, weights_only=True)["weight"], mode="sum"
        )
    else:
        module = load_served(file)
    seconds = time.perf_counter() - start
    module(ids, offsets)
    return {"seconds": seconds, "resident": _resident() - before}


def _write(model: nn.Module, case: dict[str, Any], path: Path) -> tuple[Tensor, int]:
    """Sparsify and export; which rows of the first table are kept, and the bytes of the folder."""
    sparsifier = None
    if case["removed"]:
        sparsifier = DataNormSparsifier(
            sparsity_level=case["removed"], sparse_block_shape="row", norm="L2"
        )
        sparsifier.add_model(model)
        sparsifier.step()
        sparsifier.apply_masks()
    export(model, sparsifier, path, dtype=case["dtype"])
    weight = next(model.parameters())
    return (weight != 0).any(1), sum(file.stat().st_size for file in path.iterdir())


def _tbe(case: dict[str, Any], rows: int, remap: Tensor | None, array: bool) -> Call:
    """FBGEMM's inference module with random weights, which the time does not depend on."""
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [
            (
                "t",
                rows,
                case["dim"],
                SparseType.FP32 if case["dtype"] == "fp32" else SparseType.INT8,
                EmbeddingLocation.HOST,
            )
        ],
        pooling_mode=PoolingMode.SUM,
        device="cpu",
        index_remapping=None if remap is None else [remap],
        use_array_for_index_remapping=array,
        output_dtype=SparseType.FP32,
        indices_dtype=torch.int64,
        row_alignment=1,
    )
    module.fill_random_weights()
    found: Call = module
    return found


def _map_bytes(case: dict[str, Any]) -> int:
    """What FBGEMM's hash map of the kept rows takes, in a process that has not freed anything yet
    that it could reuse."""
    count = case["rows"] - round(case["rows"] * case["removed"])
    if count == case["rows"]:
        return 0
    import fbgemm_gpu  # noqa: F401

    kept, places = (
        torch.randperm(case["rows"])[:count].sort().values.int(),
        torch.arange(count).int(),
    )
    before = _resident()
    found = torch.classes.fbgemm.PrunedMapCPU()
    found.insert(kept, places, torch.tensor([0, count]).int(), 1)
    return _resident() - before


def _frequency(case: dict[str, Any]) -> Tensor | None:
    """The frequency of each id by Zipf's law with exponent 1.05; None: uniform. The rarest ids have
    the smallest rows."""
    return (
        None if case["ids"] == "uniform" else torch.arange(1, case["rows"] + 1).double().pow(-1.05)
    )


def _ids(case: dict[str, Any], rows: int, frequency: Tensor | None) -> Tensor:
    count = case["bags"] * case["ids_a_bag"]
    if frequency is None:
        return torch.randint(rows, (count,))
    return torch.multinomial(frequency, count, replacement=True)


def _interleaved(
    calls: dict[str, Any], draw: Callable[[], tuple[Any, ...]], rounds: int
) -> dict[str, float]:
    """The median seconds of each call, on ids that nothing has looked up before.

    All are drawn before the first call: drawing between calls would empty the caches and return the
    heap's memory."""
    names = list(calls)
    drawn = [{name: draw() for name in names} for _ in range(rounds)]
    for call in calls.values():
        for _ in range(3):  # the first calls allocate
            call(*draw())
    found: dict[str, list[float]] = {name: [] for name in names}
    for at, args in enumerate(drawn):
        first = at % len(names)  # each finds the caches as its peers left them, so they take turns
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            calls[name](*args[name])
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def _resident() -> int:
    """Bytes of this process that are in memory and not of files; 0 where the kernel does not
    say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return 1024 * next(
        int(line.split()[1])
        for line in status.read_text().splitlines()
        if line.startswith("RssAnon")
    )


if __name__ == "__main__":
    sys.exit(main())
