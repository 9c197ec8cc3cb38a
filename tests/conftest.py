"""What holds for every test? One thread per process, unless a test asks for more.

Two test files run at a time, each with up to four ranks: threads of small operations would wait for each other, for
most of the time on a busy machine. Processes that tests start take the variable over.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

pytest_plugins = ["tests.dist.plugin"]
