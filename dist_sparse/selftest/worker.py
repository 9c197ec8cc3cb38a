"""One rank of a self-test: ``python -m dist_sparse.selftest.worker FOLDER RANK WORLD DEVICE CHECK
...`` writes a line of JSON for each check into ``FOLDER/RANK.jsonl``."""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

_COLLECTIVES: Final = timedelta(seconds=120)


def main(words: list[str]) -> int:
    """Run the checks; return 1 after one that is not passed: its error may have left the device
    unusable, or this rank at another place than the others."""
    folder, rank, world, device = Path(words[0]), int(words[1]), int(words[2]), words[3]
    # What TorchRec and FBGEMM say while they are imported is not of this machine.
    warnings.simplefilter("ignore")
    from dist_sparse.groups import group_over, world_ranks
    from dist_sparse.selftest.checks import CHECKS, Machine
    from dist_sparse.selftest.results import WRONG

    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if place.type == "cuda" else "gloo"
    store = f"file://{folder / 'store'}"
    dist.init_process_group(backend, store, _COLLECTIVES, world, rank)
    machine = Machine(place, rank, world)
    with (folder / f"{rank}.jsonl").open("w") as file:
        for name in words[4:]:
            outcome = _outcome(CHECKS[name], machine)
            file.write(json.dumps({"check": name, **outcome}) + "\n")
            file.flush()
            if outcome["status"] in WRONG:
                return 1
    # The store ends with the first process: the others may not have begun.
    group_over(world_ranks()).all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    return 0


def _outcome(check: Any, machine: Any) -> dict[str, Any]:
    from dist_sparse.selftest.checks import Difference, NotRun

    started = time.perf_counter()
    figures: dict[str, Any] = {}
    try:
        found = check(machine)
        status, says, figures = "ok", found.says, found.figures
    except NotRun as reason:
        status, says = "not run", str(reason)
    except Difference as difference:
        status, says = "differs", str(difference)
    except Exception as error:
        # The whole report goes into an issue: where it was raised is what helps.
        status, says = "failed", f"{type(error).__name__}: {error}"
        figures = {"traceback": traceback.format_exc()}
    seconds = time.perf_counter() - started
    return {"status": status, "says": says, "seconds": seconds, "figures": figures}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
