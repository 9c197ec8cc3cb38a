"""Two launchers on one machine do what docs/several_nodes.md says."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile

import pytest

from tests.docs.test_code_blocks import ROOT, read

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "several_nodes.md"


@pytest.mark.dist
@pytest.mark.skipif(
    sys.platform != "linux", reason="the loopback interface has another name elsewhere"
)
def test_two_launchers_train_as_two_nodes() -> None:
    pytest.importorskip("torchrec")
    command = next(block.code for block in read(PAGE) if block.kind == "console")
    said = next(block.code for block in read(PAGE) if block.kind == "text")
    with socket.create_server(("127.0.0.1", 0)) as free:
        words = shlex.split(
            command.replace("\\\n", "").replace(":29400", f":{free.getsockname()[1]}")
        )
    assert words[0] == "dist-sparse"
    words[:1] = [sys.executable, "-m", "dist_sparse"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("GLOO_SOCKET_IFNAME", "PYTHONHASHSEED"):
        environment.pop(name, None)
    with tempfile.TemporaryFile("w+") as errors:
        nodes = [
            subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            for _ in range(2)
        ]
        try:
            printed = sorted(node.communicate(timeout=240)[0] for node in nodes)
        finally:
            for node in nodes:
                node.terminate()  # the launcher ends all that it has started
                node.wait()
        errors.seek(0)
        assert [node.returncode for node in nodes] == [0, 0], errors.read()[-4000:]
    assert printed == ["", said]
