"""The C++ program of docs/serving.md, built and run as the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.serving.folders import Source, table, write

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


def block(kind: str, within: str) -> str:
    """The block of the page with a text in it."""
    found = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (one,) = [each for each in found if within in each]
    return str(one)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="no C++ compiler here: the program of docs/serving.md is not built",
)
def test_the_program(tmp_path: Path) -> None:
    """With FBGEMM's operator, and with libtorch alone."""
    weight = table(40, 8, 0.5, whole=True)
    weight[0], weight[1] = 0, torch.arange(1.0, 9.0)
    write(tmp_path / "served", ("", "bag", [Source("t", weight, ["f"])]))
    (tmp_path / "serve.cpp").write_text(block("cpp", "AOTIModelPackageLoader"))
    commands = block("console", "serve.cpp")
    assert commands.count("g++") == commands.count("./serve package.pt2") == 1
    compiled = block("console", "aoti_compile_and_package")
    assert compiled.count('load_served("served")') == 1
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("LD_LIBRARY_PATH", None)

    def run(script: str) -> list[float]:
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [
            float(each)
            for line in done.stdout.splitlines()
            if "[" not in line
            for each in line.split()
        ]

    want = [0.0] * 8 + [2.0 * each for each in range(1, 9)]
    run(compiled)
    assert run(commands) == want
    run(compiled.replace('load_served("served")', 'load_served("served", fbgemm=False)'))
    assert run("./serve package.pt2") == want
