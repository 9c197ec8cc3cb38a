"""The kernels as machine code, which needs no GPU: what is compiled, and what its instructions are.

``python -m tests.extras.device.machine_code CAPABILITY`` prints a JSON object: the :class:`Counts`
of each kernel by its name. In a process of its own, because Triton decides when a kernel is defined
whether it is compiled or interpreted. Instructions are counted in the output of ``nvdisasm``, which
comes with Triton.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

__all__ = [
    "Compiled",
    "Counts",
    "compiled",
    "counts_of",
    "kernels_of_codes",
    "kernels_of_rows",
    "kernels_of_updates",
]


class Compiled(NamedTuple):
    """A kernel to compile.

    Args:
        kernel: of Triton.
        arguments: their types, by name.
        constants: what it is compiled for, by name.
    """

    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any]


class Counts(NamedTuple):
    """What a kernel's machine code consists of.

    Args:
        registers: of a thread.
        tile: instructions of the largest loop, a loop inside it counted once, or of a kernel
            without a loop: of a tile, for each warp.
        popc: POPC, of which a multiprocessor issues a quarter as many as of most instructions.
        shared_atomics: ATOMS.
        fences: MEMBAR, which wait for all memory operations before them.
        loads: loads from memory in that loop. There are more of them if one gets narrower, though
            another stays wide.
        load: bits of the widest of these.
    """

    registers: int
    tile: int
    popc: int
    shared_atomics: int
    fences: int
    loads: int
    load: int


def kernels_of_updates() -> dict[str, Compiled]:
    """The kernels of mask updates: of 1x4 blocks, of rows and their parts, by each kind of totals,
    and of held or listed scores."""
    import triton.language as tl

    from dist_sparse.extras.device import kernels

    by: dict[str, dict[str, Any]] = {
        "": {},
        "sums": {"totals": torch.float32, "shifts": True},
        "sums, odd": {"totals": torch.float32, "divides": True},
        "sums of elements": {"totals": torch.float32, "of_elements": True, "shifts": True},
        "counts": {"totals": torch.int32, "weights": False, "divides": True, "shifts": True},
        "decayed counts": {"totals": torch.float64, "weights": False, "divides": True},
    }
    sample = {"BUCKETS": 2048, "COPIES": 32, "SAMPLES": True}
    first = {"LISTS": True, "PACKS": True, "COUNTS": True}
    held = {"BUCKETS": 2048, "COPIES": 32, "HOLDS": True}
    found = {}
    for name, width, known, does in (
        ("1x4 sample", 4, "sums", sample),
        ("1x4", 4, "", first),
        ("1x4 sums", 4, "sums", first),
        ("1x4 sums, odd", 4, "sums, odd", first),
        ("1x4 sums of elements", 4, "sums of elements", first),
        ("1x1 sums", 1, "sums", first),
        ("1x4 again", 4, "", {"BUCKETS": 1024, "COPIES": 32}),
        ("rows", 128, "", held),
        ("rows sums", 128, "sums", held),
        ("rows sums of elements", 128, "sums of elements", held),
        ("rows counts", 128, "counts", held),
        ("rows decayed counts", 128, "decayed counts", held),
        ("rows of 100, sums", 100, "sums", held),
        ("rows of 10, sums", 10, "sums", held),
        ("count held", 0, "", {"BUCKETS": 1024, "COPIES": 32}),
        ("count listed", 0, "", {"BUCKETS": 1024, "COPIES": 32, "LISTED": True}),
        ("ties listed", 0, "", {"TIES": True, "LISTED": True, "PLACED": True}),
        ("pack held", 0, "", {"PACKS": True, "COUNTS": True}),
        ("pack listed", 0, "", {"PACKS": True, "LISTED": True, "PLACED": True}),
    ):
        scoring = kernels.Scoring(torch.float32, width, **by[known])
        constants: dict[str, Any] = dict.fromkeys(_SWEEPS, False) | scoring.constants() | does
        constants |= {"BUCKETS": does.get("BUCKETS", 0), "COPIES": does.get("COPIES", 1)}
        constants |= {"FIELDS": len(kernels.Job._fields), "STEPS": 3, "VECTOR": 4}
        lanes = kernels.lanes_for(width)
        constants |= {"BLOCKS": kernels.TILE // max(2, lanes), "LANES": lanes}
        arguments = {"jobs": "*i64", "count": "i32", "counts": "*i64"}
        if constants["BUCKETS"]:
            arguments["counts"] = "*i32"
        found[name] = Compiled(kernels.sweep_kernel, arguments, constants)
    for name, known in (("parts of rows", ""), ("parts of rows, sums", "sums")):
        scoring = kernels.Scoring(torch.float32, 128, **by[known])
        constants = {"FIELDS": len(kernels.Job._fields), "STEPS": 3, "VECTOR": 4}
        constants |= {"BLOCKS": kernels.TILE // 16, "LANES": 16, **scoring.constants()}
        arguments = {"jobs": "*i64", "count": "i32", "most": "*i64"}
        found[name] = Compiled(kernels.sums_kernel, arguments, constants)
    for name, width, changed in (
        ("prune 1x4", 4, True),
        ("prune rows", 128, True),
        ("prune rows of 100", 100, True),
        ("zero 1x4", 4, False),
    ):
        constants = {"FIELDS": len(kernels.Pruning._fields), "STEPS": 3, "WORD": tl.int32}
        constants |= {"WIDTH": width, "BLOCKS": kernels.TILE // min(width, 16)}
        constants |= {"LANES": min(width, 16), "CHANGED": changed, "ALIGNED": True}
        found[name] = Compiled(kernels.prune_kernel, {"jobs": "*i64", "count": "i32"}, constants)
    return found


_SWEEPS: Final = ("LISTED", "PLACED", "SAMPLES", "HOLDS", "LISTS", "TIES", "PACKS", "COUNTS")


def kernels_of_rows() -> dict[str, Compiled]:
    """The kernels of rows: clean and flag the rows of a lookup, clean all rows, read and count."""
    import triton.language as tl

    from dist_sparse.extras.device.row_kernels import (
        Fields,
        LookupFields,
        visit_lookups,
        visit_rows,
    )

    found = {}
    weights = {"out": "*fp32"}
    for name, tensors, does in (
        ("flags", {"out": "*u8"}, {"PACKED": True}),
        ("weights", weights, {"PACKED": True}),
        ("given weights", {**weights, "given": "*fp32"}, {"PACKED": True}),
        ("weights, sampled", weights, {"PACKED": True, "SAMPLES": True}),
        ("sample", {}, {"SAMPLES": True}),
        ("count", {}, {"TYPE": tl.int32}),
    ):
        arguments = {"ids": "*i64", "count": "i32", "ends": "*i64", "stride": "i32"}
        arguments |= {"table": "*i64", "features": "i32", **tensors}
        constants = {"FIELDS": len(LookupFields._fields), "STEPS": 5, "IDS": 1024}
        constants |= {"TYPE": None, "SAMPLES": False, "PACKED": False, **does}
        constants |= dict.fromkeys({"out", "given"} - tensors.keys())
        found[name] = Compiled(visit_lookups, arguments, constants)
    for name, ids, shifts, word, steps, marks, by_id in (
        ("clean read", "*i64", True, tl.int32, 5, False, True),
        ("clean read, sampled", "*i64", True, tl.int32, 5, False, True),
        ("clean read, odd", "*i32", False, tl.int16, 0, False, True),
        ("flag", "*i64", True, tl.int32, 5, True, True),
        ("clean all", "*i64", True, tl.int32, 2, False, False),
    ):
        arguments = {"ids": ids, "count": "i32", "ends": "*i32", "stride": "i32"}
        arguments |= {"table": "*i64", "features": "i32"}
        constants = {
            "FIELDS": len(Fields._fields),
            "STEPS": steps,
            "SHIFTS": shifts,
            "WORD": word,
            "SPAN": 1024 if marks or not by_id else 32,
            "IDS": 1024 if marks else 32,
            "COLS": 1 if marks else 32,
            "MARKS": marks,
            "BY_ID": by_id,
            "LOOKUP_FIELDS": len(LookupFields._fields),
            "PACKED": False,
            "lookups": None,
        }
        if name.endswith("sampled"):
            arguments["lookups"] = "*i64"
            del constants["lookups"]
        found[name] = Compiled(visit_rows, arguments, constants)
    return found


def kernels_of_codes() -> dict[str, Compiled]:
    """The kernels of codes: assign them, sum rows by them, look rows up."""
    from dist_sparse.extras.device.code_kernels import assign_kernel, decode_kernel, sum_kernel

    rows = {"rows": "*fp32", "count": "i32", "row_stride": "i32", "col_stride": "i32"}
    assigns = {"groups": "i32", "width": "i32", "scales": "*fp64", "constant": "*fp64"}
    assigns |= {"linear": "*fp64", "out": "*u8", "out_stride": "i32"}
    sums = {"columns": "i32", "width": "i32", "scales": "*fp64", "codes": "*u8"}
    sums |= {"code_stride": "i32", "sums": "*i64"}
    found = {
        "assign codes": Compiled(assign_kernel, rows | assigns, {"MOST": 2.0**20, "ROWS": 32}),
        "sum by code": Compiled(sum_kernel, rows | sums, {"MOST": 2.0**20, "ROWS": 16, "COLS": 32}),
    }
    looks_up = {"ids": "*i64", "count": "i32", "offsets": "*i64", "bags": "i32"}
    looks_up |= {"weights": "*fp32", "table": "*i64", "features": "i32", "widest": "i32"}
    looks_up |= {"out": "*fp32", "out_stride": "i32"}
    for name, pooled, mean, weighted in (
        ("decode sums", True, False, False),
        ("decode weighted means", True, True, True),
        ("decode sequences", False, False, False),
    ):
        constants = {"STEPS": 5, "POOLED": pooled, "MEAN": mean, "WEIGHTED": weighted}
        constants |= {"BAGS": 8, "COLS": 32}
        found[name] = Compiled(decode_kernel, looks_up, constants)
    return found


def compiled(one: Compiled, capability: int) -> Any:
    """Return a kernel compiled by Triton for GPUs of a compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**one.arguments, **dict.fromkeys(one.constants, "constexpr")}
    source = ASTSource(fn=one.kernel, signature=signature, constexprs=one.constants)
    target, options = GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


def tools() -> Path:
    """Return the folder of NVIDIA's tools in Triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def counts_of(binary: Any) -> Counts:
    """Return what a compiled kernel consists of."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        code = _output("nvdisasm", "-c", file.name)
        usage = _output("cuobjdump", "-res-usage", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    instructions, loop = _largest_loop(code)
    names = [_NAME.sub(r"\1", each).split(".") for each in instructions]
    widths = [_bits(name) for name in names[loop] if name[0] == "LDG"]
    kinds = [name[0] for name in names]
    return Counts(
        registers=int(registers[1]),
        tile=loop.stop - loop.start,
        popc=kinds.count("POPC"),
        shared_atomics=kinds.count("ATOMS"),
        fences=kinds.count("MEMBAR"),
        loads=len(widths),
        load=max(widths, default=0),
    )


# The name of an instruction behind its predicate, if it has one.
_NAME: Final = re.compile(r"^(?:@!?U?P\w+\s+)?([A-Z0-9_.]+).*$", re.DOTALL)


def _bits(name: list[str]) -> int:
    """Return how many bits a load reads, by the parts of its name."""
    numbers = [int(part) for part in name if part.isdecimal()]
    return numbers[0] if numbers else 8 if "U8" in name else 32


def _output(tool: str, *arguments: str) -> str:
    done = subprocess.run([tools() / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _largest_loop(code: str) -> tuple[list[str], slice]:
    """Return all instructions, and where the largest loop is: from a label to the last jump back to
    it. Without a loop, that is all up to the end of the program."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            instructions.append(instruction[1])
    largest = slice(0, 0)
    for end, start in _jumps(instructions, labels):
        if end + 1 - start > largest.stop - largest.start:
            largest = slice(start, end + 1)
    if not largest.stop:
        ends = [place for place, text in enumerate(instructions) if "EXIT" in text]
        largest = slice(0, ends[-1] + 1)
    return instructions, largest


def _jumps(instructions: list[str], labels: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Yield the places of the jumps back, and where they go."""
    for place, text in enumerate(instructions):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        start = labels.get(target[1], place) if target else place
        # The last instruction of each kernel jumps to itself.
        if start < place:
            yield place, start


def main(capability: int) -> None:
    known = {**kernels_of_updates(), **kernels_of_rows(), **kernels_of_codes()}
    found = {name: counts_of(compiled(one, capability)) for name, one in known.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
