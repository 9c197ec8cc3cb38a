"""A real Chromium for tests of pages, controlled through a pipe, which needs no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Browser", "chromium", "opened"]

_FLAGS = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-pipe",
    ),
    *(
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ),
]
_SECONDS = 60

# Chromium reads commands from file descriptor 3 and writes to 4; whatever these were is moved out
# of the way first.
_STARTER = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

_CONTRASTS = """
(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => {
    const [r, g, b] = c.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const c = rgb(getComputedStyle(node).backgroundColor);
    return c.length === 4 && c[3] === 0 ? (node.parentElement ? behind(node.parentElement) : [255, 255, 255]) : c;
  };
  const low = [];
  for (const node of document.querySelectorAll(SELECTOR)) {
    const says = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    const style = getComputedStyle(node);
    if (!says || style.visibility === "hidden" || node.tagName === "SCRIPT") continue;
    const pair = [light(rgb(style.color).slice(0, 3)), light(behind(node).slice(0, 3))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) low.push([node.className, node.textContent.slice(0, 30), ratio]);
  }
  return low;
})()
"""


def chromium() -> str | None:
    """Return the path of Chromium, None if it is not installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser. ``requested``: all addresses that it has requested."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._number, self._buffer, self._session = 0, b"", ""
        self.requested: list[str] = []
        target = self._do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._do("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime"):
            self._do(f"{domain}.enable")

    def open(
        self,
        file: Path,
        width: int,
        *,
        dark: bool = False,
        script: bool = True,
        paper: bool = False,
    ) -> None:
        """Load the page in a window ``width`` CSS pixels wide, or on paper; return when it is laid
        out."""
        self.requested.clear()
        self._do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._do("Emulation.setEmulatedMedia", media="print" if paper else "", features=[scheme])
        self._do("Emulation.setScriptExecutionDisabled", value=not script)
        self._do("Page.navigate", url=file.resolve().as_uri())
        until = time.monotonic() + _SECONDS
        while self.value("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < until, "the page did not load"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page; return the value as JSON."""
        came = self._do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in came, came["exceptionDetails"]
        return came["result"].get("value")

    def low_contrasts(self, selector: str = "body *") -> list[Any]:
        """Return class, text and contrast of the elements with text whose contrast with what is
        behind is below 4.5."""
        found: list[Any] = self.value(_CONTRASTS.replace("SELECTOR", json.dumps(selector)))
        return found

    def point(self, x: float, y: float, *, click: bool = False) -> None:
        """Move the pointer to CSS pixels of the window, and click."""
        for kind in ("mouseMoved", *(("mousePressed", "mouseReleased") if click else ())):
            self._do("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, file: Path, height: int | None = None) -> None:
        """Write a PNG of the whole page, or of its upper part, for people to look at."""
        size = self.value("[window.innerWidth, document.documentElement.scrollHeight]")
        clip = {
            "x": 0,
            "y": 0,
            "width": size[0],
            "height": min(size[1], height or size[1]),
            "scale": 1,
        }
        came = self._do(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        file.write_bytes(base64.b64decode(came["data"]))

    def close(self) -> None:
        """End the browser and all of its processes."""
        self._session = ""
        self._do("Browser.close")

    def _do(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            came = self._next()
            if came.get("method") == "Network.requestWillBeSent":
                self.requested.append(came["params"]["request"]["url"])
            if came.get("id") == self._number:
                assert "error" not in came, (method, came["error"])
                result: dict[str, Any] = came["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 20)
            assert piece, "Chromium has gone"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        came: dict[str, Any] = json.loads(message)
        return came


@contextmanager
def opened(folder: Path) -> Iterator[Browser]:
    """Start a Chromium with an empty profile in ``folder``."""
    program = chromium()
    assert program is not None
    (to_read, write), (read, to_write) = os.pipe(), os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _STARTER,
            str(to_read),
            str(to_write),
            program,
            *_FLAGS,
            f"--user-data-dir={folder}",
        ],
        pass_fds=(to_read, to_write),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        browser = Browser(read, write)
        yield browser
        browser.close()
        process.wait(_SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(read)
        os.close(write)
