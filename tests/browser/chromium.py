"""A headless Chromium, told what to do over a pipe in the DevTools protocol."""

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
from typing import Any, Literal

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe"),
)
# It takes its orders at descriptor 3 and replies at 4.
_START = """
import os, sys
reads, writes, program, *flags = sys.argv[1:]
os.dup2(int(reads), 3)
os.dup2(int(writes), 4)
os.execv(program, [program, *flags])
"""
_PATIENCE = 20.0


class Page:
    """A page of the browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number, self._rest = 0, b""
        self._session: str | None = None
        self.messages: list[str] = []  # errors and warnings of the page
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        found = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _PATIENCE
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"never: {script}\n{self.messages}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({selector!r}).innerText"))

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({selector!r}).focus()")
        self._call("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key="Enter",
                code="Enter",
                text="\r" if kind == "keyDown" else "",
                windowsVirtualKeyCode=13,
            )

    def look(self, width: int, height: int, scheme: Literal["light", "dark"] = "light") -> None:
        """Have a window of this size, in pixels, and these colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def shoot(self, path: Path) -> None:
        """A picture of the whole page."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != self._number:
            self._note(reply)
        assert "error" not in reply, reply
        result: dict[str, Any] = reply["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from, 2**16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.messages.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a browser of its own, whose profile is in a folder."""
    assert PROGRAM is not None, "there is no chromium"
    (browser_reads, to_browser), (from_browser, browser_writes) = os.pipe(), os.pipe()
    ends = (str(browser_reads), str(browser_writes))
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *ends, PROGRAM, *_FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(browser_reads, browser_writes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(browser_reads)
    os.close(browser_writes)
    try:
        yield Page(to_browser, from_browser)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
