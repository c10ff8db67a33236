"""A headless Chromium, asked over its DevTools protocol by the few messages that the report's tests need."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PATIENCE_S = 60.0
WINDOW = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")


class Page:
    """One page; `problems` are console errors and exceptions, `asked` the addresses that it loaded."""

    def __init__(self, to: BinaryIO, answers: BinaryIO) -> None:
        self._to, self._answers = to, answers
        self._number = 0
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and wait for its answer; events that come meanwhile are noted."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters, **self._session}
        self._to.write(json.dumps(command).encode() + b"\0")
        while True:
            message = json.loads(self._received())
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, path: Path, *, width: int = 1280, height: int = 800) -> float:
        """Load a file and wait until all its figures are drawn; seconds from the start of the page until then."""
        self.resize(width=width, height=height)
        for address in ("about:blank", path.as_uri()):
            self.call("Page.navigate", url=address)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if self.evaluate("document.documentElement?.dataset.drawn !== undefined"):
                return float(self.evaluate("performance.now()")) / 1e3
            self.evaluate("new Promise((resolve) => setTimeout(resolve, 50))")
        raise AssertionError(f"the page was not drawn: {self.problems}")

    def resize(self, *, width: int, height: int) -> None:
        """The window; below 600 px that of a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def waited(self, expression: str) -> Any:
        """The expression's value as soon as it is true, else what it is after three seconds."""
        return self.evaluate(
            "new Promise((resolve) => { const look = (left) => {"
            f" const value = {expression}; if (value || !left) resolve(value); else setTimeout(look, 50, left - 1); }};"
            " look(60); })"
        )

    def click(self, x: float, y: float) -> None:
        """Move there, press and release."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(parameters["args"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(parameters["request"]["url"])

    def _received(self) -> bytes:
        """One message, whole; each ends with a zero byte."""
        whole = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "chromium ended"
            whole += byte
        return bytes(whole)


@contextmanager
def chromium_page(profile: Path, *flags: str) -> Iterator[Page]:
    """A new browser with one page, asked through its file descriptors 3 and 4; both are gone afterwards."""
    assert CHROMIUM is not None
    browser = [CHROMIUM, *WINDOW, f"--user-data-dir={profile}", *flags]
    (commands, to), (answers, back) = os.pipe(), os.pipe()
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{back}', "bash", *browser],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(commands, back),
    )
    os.close(commands)
    os.close(back)
    try:
        with os.fdopen(to, "wb", buffering=0) as sent, os.fdopen(answers, "rb") as received:
            yield Page(sent, received)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        process.kill()
        process.wait()
