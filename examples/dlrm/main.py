"""Train a DLRM, remove the rows that training never looked up, and export it.

Compare its artifacts with those of smaller models, trained in the same way:
sparsified on a schedule, with fewer columns, and with ids hashed into fewer
rows.

One process:     python examples/dlrm/main.py
Two processes:   dist-sparse launch --nproc 2 --ranks 0 examples/dlrm/main.py
With restarts:   dist-sparse launch --nproc 2 --max-restarts 3 \\
                   examples/dlrm/main.py -- --checkpoint runs/saved
"""

from __future__ import annotations

import sys
from pathlib import Path

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dlrm.options import parse

if __name__ == "__main__":
    options = parse(__doc__)
    # After the options: a wrong one is refused before TorchRec loads, which takes many seconds.
    from dlrm.job import main
    from dlrm.process import run_and_leave

    run_and_leave(main, options)
