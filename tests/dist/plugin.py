"""Pytest plugin: test functions that run on real gloo ranks.

    from tests.dist.plugin import on_ranks

    @on_ranks(2)
    def test_sum() -> None:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2

    @on_ranks(2, 4)  # test_masks[2-rows], test_masks[4-rows], ...
    @pytest.mark.parametrize("block", ["rows", "small"])
    def test_masks(world: int, block: str, tmp_path: Path) -> None: ...

The function runs on all ranks at the same time; pytest reports once. Ranks start with the first
test that needs a world of that size, and run all tests of that world until the run ends: starting
them for each module costs a sixth of the run. A failure ends them (they may be at different
collectives), and the next test gets new ones. So tests share what a module or a library keeps in a
process, as they do without ranks; what a test patches through ``monkeypatch`` and its filters of
warnings end with it. Each draws from its own name, as tests without ranks do: the same on every
rank.

- ``@on_ranks(1, 2, 4)`` runs the test once for each world; ``world`` may be one of its arguments,
  and need not be.
- ``@on_ranks()`` takes the world from the test's own
  ``@pytest.mark.parametrize(("world", ...), ...)``.
- ``local_world_size=`` sets the ranks of a "host"; by default a world of 4 is two hosts of 2 ranks
  (``harness.LOCAL``).
- Parameters and fixtures are made by pytest and sent to the ranks, so they must pickle: a
  ``tmp_path`` is one folder for all ranks, and functions and classes must be those of a module. For
  other things pass a name, and look it up.

Run one case with ``pytest tests/dist/test_x.py -k "case and 4"``; leave all of them out with
``-m "not dist"``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.dist.harness import LOCAL, Ranks, RanksFailed

__all__ = ["on_ranks"]

Test = TypeVar("Test", bound=Callable[..., None])

_running: dict[tuple[int, int | None], Ranks] = {}
"""The ranks of this run, by world and ``local_world_size``."""


def on_ranks(*worlds: int, local_world_size: int | None = None) -> Callable[[Test], Test]:
    """Run a test function on this many ranks at a time; see the module's docstring."""

    def mark(test: Test) -> Test:
        return pytest.mark.dist(
            pytest.mark.on_ranks(*worlds, local_world_size=local_world_size)(test)
        )

    return mark


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "on_ranks(*worlds): runs on gloo ranks; see tests/dist/plugin.py"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("on_ranks")
    if (
        marker is None
        or not marker.args
        or (len(marker.args) == 1 and "world" not in metafunc.fixturenames)
    ):
        return
    if "world" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world")
    metafunc.parametrize("world", marker.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test on its ranks in place of this process."""
    marker = pyfuncitem.get_closest_marker("on_ranks")
    if marker is None:
        return None
    call = getattr(pyfuncitem, "callspec", None)
    world = call.params["world"] if call is not None and "world" in call.params else marker.args[0]
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    try:
        pickle.dumps((pyfuncitem.obj, arguments))
    except Exception as error:
        pytest.fail(f"Arguments of tests on ranks must pickle: {error}", pytrace=False)
    key = (world, marker.kwargs["local_world_size"] or LOCAL.get(world))
    if key not in _running or not _running[key].alive:
        _running[key] = Ranks(*key)
    try:
        _running[key].call(pyfuncitem.obj, **arguments)
    except RanksFailed as failed:
        pytest.fail(str(failed), pytrace=False)
    return True


def pytest_sessionfinish() -> None:
    for ranks in _running.values():
        ranks.close()
    _running.clear()
