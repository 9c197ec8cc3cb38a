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
import zlib
from collections import defaultdict
from typing import Any

import pytest

from tests import seeds

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ["COLUMNS"] = "80"  # tables fit the terminal that tests are started from
# Triton decides when it is imported; tests/extras/device/simulated run its kernels on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Only Linux has it, and not every container allows it.
with contextlib.suppress(AttributeError, OSError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

pytest_plugins = ["tests.dist.plugin"]

LONG = [
    "dist/test_masks.py",
    "dist/test_remove_attacks.py",
    "test_extras.py",
    "dist/test_enforce.py",
    "examples/test_dlrm.py",
    "launch/test_signals.py",
    "test_sweep.py",
    "test_house.py",
    "launch/test_torchx.py",
    "launch/test_jobs.py",
    "docs/test_site.py",
    "docs/test_code_blocks.py",
    "extras/optim/test_example.py",
    "dist/test_enforce_equals.py",
    "dist/test_plugin.py",
    "test_benchmarks.py",
    "dist/test_dead.py",
    "extras/device/test_rows_triton.py",
    "cli/test_doctor.py",
    "examples/test_notebook.py",
    "test_memory.py",
]
"""Files that take long. pytest-xdist hands out files in this order, so that none of them runs alone
at the end."""


ON_RANKS, IN_PROCESS, OF_A_FILE = 16, 4, 8
"""`make test` runs about one in this many cases of a test, and `make test-slow` the others. A case on
ranks takes a second or more, and most others a few hundredths. Of extras and benchmarks, it runs one
in this many cases of a file."""


# First: -m takes tests out in another of these hooks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("whole")):
            path = item.path.relative_to(config.rootpath / "tests")
            by_file = path.parts[0] in ("extras", "benchmarks")
            cases[str(path) if by_file else item.nodeid.split("[")[0]].append(item)
    for name, together in cases.items():
        share = ON_RANKS if together[0].get_closest_marker("dist") else IN_PROCESS
        for item in rarely_run(together, OF_A_FILE if name.endswith(".py") else share):
            item.add_marker(pytest.mark.slow)
    names = [str(config.rootpath / "tests" / name) for name in LONG]
    order = {name: number for number, name in enumerate(names)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))


def rarely_run(cases: list[pytest.Item], share: int) -> list[pytest.Item]:
    """Return the cases that `make test` leaves out, which runs one in ``share``.

    Every n-th case of a product of axes would always meet the same values of an axis whose length
    has a divisor in common with n. So cases are drawn by a hash of their names, and those that are
    the first of a test, or with a value of an axis, are drawn before the others.
    """
    by_hash = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
    seen: set[tuple[str, ...]] = set()
    first, others = [], []
    for item in by_hash:
        test = item.nodeid.split("[")[0]
        callspec = getattr(item, "callspec", None)  # a test without parameters has none
        params = callspec.params if callspec else {}
        values = {(test,), *((test, axis, repr(value)) for axis, value in params.items())}
        (first if values - seen else others).append(item)
        seen |= values
    runs = -(-len(cases) // share)
    return (first + others)[runs:]


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
