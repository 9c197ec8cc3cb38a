"""The Triton kernel of lookups equals the rule, in Triton's interpreter and on a GPU, and it and the
kernels of mask updates compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from tests.extras.device.triton_cases import CASES, COMPILED

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only")


@lru_cache
def results(device: str, cache: Path) -> dict[str, str]:
    """The errors of all cases, each empty if there was none, from one process on ``device``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.extras.device.triton_cases", device],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    if done.returncode:  # a bad address ends the process in the middle of a case
        return {
            name: found.get(name, f"{done.returncode=}\n{done.stderr}")
            for name in [*CASES, *COMPILED]
        }
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name: str, cache: Path) -> None:
    error = results("cpu", cache)[name]
    assert not error, error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, cache: Path) -> None:
    error = results("cuda", cache)[name]
    assert not error, error


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_cuda(name: str, cache: Path) -> None:
    error = results("compiler", cache)[name]
    assert not error, error
