"""A headless Chromium, asked over its DevTools protocol by the few messages that the report's tests need."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PATIENCE_S = 60.0


class Page:
    """One page; `problems` are console errors and exceptions, `asked` the addresses that it loaded."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        self._socket.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self._file = self._socket.makefile("rb")
        while self._file.readline() not in (b"\r\n", b""):
            pass
        self._number = 0
        self.problems: list[str] = []
        self.asked: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and wait for its answer; events that come meanwhile are noted."""
        self._number += 1
        self._send(json.dumps({"id": self._number, "method": method, "params": parameters}).encode())
        while True:
            message = json.loads(self._receive())
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
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

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

    def _send(self, payload: bytes) -> None:
        mask = os.urandom(4)
        size = len(payload)
        head = (
            bytes([0x81, 0x80 | size]) if size < 126 else bytes([0x81, 0x80 | 126]) + struct.pack(">H", size)
        )
        self._socket.sendall(head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload)))

    def _receive(self) -> bytes:
        """One text message, whole."""
        whole = b""
        while True:
            first, second = self._file.read(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack(">H", self._file.read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self._file.read(8))
            payload = self._file.read(size)
            if first & 0x0F in (0, 1):
                whole += payload
                if first & 0x80:
                    return whole


@contextmanager
def chromium_page(profile: Path, *flags: str) -> Iterator[Page]:
    """A new browser with one page; both are gone afterwards."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
            "--remote-allow-origins=*",
            f"--user-data-dir={profile}",
            *flags,
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with closing(Page(_page_address(profile / "DevToolsActivePort", process))) as page:
            yield page
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        process.kill()
        process.wait()


def _page_address(file: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        assert process.poll() is None, "chromium ended"
        with suppress(OSError, ValueError, StopIteration):
            port = int(file.read_text().splitlines()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE_S) as answer:
                return next(
                    page["webSocketDebuggerUrl"] for page in json.load(answer) if page["type"] == "page"
                )
        time.sleep(0.05)
    raise AssertionError("chromium did not start")
