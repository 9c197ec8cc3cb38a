"""Settings for all tests: one thread per process, batch scheduling, seeds, tests on ranks, the
longest files first.

Two test files run at a time, each with up to four ranks: threads of small operations would wait for
each other, for most of the time on a busy machine. And with Linux's standard policy a rank that
wakes up preempts another one that was about to send it something: with more ranks than cores a
collective takes two to three times as long as with the policy for batch jobs. Processes that tests
start take both over.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from typing import Any

import pytest

from tests import seeds

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ["COLUMNS"] = "80"  # tables fit the terminal that tests are started from
# Triton decides when it is imported; tests/device run its kernels on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Only Linux has it, and not every container allows it.
with contextlib.suppress(AttributeError, OSError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

pytest_plugins = ["tests.dist.plugin"]

LONG = [
    "dist/test_enforce.py",
    "examples/test_dlrm.py",
    "dist/test_masks.py",
    "launch/test_signals.py",
    "test_sweep.py",
    "test_house.py",
    "launch/test_torchx.py",
    "launch/test_jobs.py",
    "docs/test_site.py",
    "examples/test_optim_scheduler.py",
    "dist/test_enforce_equals.py",
    "dist/test_plugin.py",
    "test_benchmarks.py",
    "dist/test_dead.py",
    "enforcer/test_rows_triton.py",
    "launch/test_files.py",
    "cli/test_doctor.py",
    "dist/test_sharded_tensors.py",
    "docs/test_code_blocks.py",
    "examples/test_notebook.py",
    "test_memory.py",
]
"""Files that take long. pytest-xdist hands out files in this order, so that none of them runs alone
at the end."""


QUICK = 4
"""`make test` runs one in so many cases of a test on ranks, of a device or of the documentation, the
first one included; `make test-slow` runs the others."""


# First: -m takes tests out in another of these hooks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        costs = item.get_closest_marker("dist") or item.path.parent.name in ("device", "docs")
        if costs and not item.get_closest_marker("slow"):
            test = item.nodeid.split("[")[0]
            if cases[test] % QUICK:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1
    names = [str(config.rootpath / "tests" / name) for name in LONG]
    order = {name: number for number, name in enumerate(names)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))


def pytest_collection_finish() -> None:
    """Full collections of garbage skip all that is imported: they would take 0.2 s each."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or triton's bindings report all their functions as leaks


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws the same examples at every run, too: its plugin reads this option later."""
    if getattr(config.option, "hypothesisseed", None) is None:
        config.option.hypothesisseed = str(seeds.SHIFT)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> None:
    """A fixture of a module draws the same, whichever of its tests comes first."""
    seeds.seed_by(f"{request.node.nodeid} {fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seeds.seed_by(item.nodeid)
