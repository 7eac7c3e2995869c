"""Headless Chromium, driven by its DevTools protocol."""

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from vllm_mtp.tools.server_process import http_get

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--remote-debugging-port=0", "--proxy-server=direct://"),
)


@cache
def find_browser() -> str | None:
    """Where Chromium is on this machine; None where it is not, or does not run."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        return None
    asked = [program, "--no-sandbox", "--version"]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(asked, capture_output=True, timeout=TIMEOUT_S, check=True)
        return program
    return None


class Browser:
    """One tab."""

    def __init__(self, address: str) -> None:
        from websockets.sync.client import connect

        # It has better to do on a crowded machine than to answer pings.
        self._socket = connect(
            address, max_size=2**26, proxy=None, ping_interval=None, max_queue=None
        )
        self._numbers = itertools.count(1)
        self.requested: list[str] = []
        """Addresses that it asked for."""
        self.errors: list[str] = []
        """Exceptions and messages of the page's console."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        number = next(self._numbers)
        self._socket.send(
            json.dumps({"id": number, "method": method, "params": parameters})
        )
        while True:
            message = json.loads(self._socket.recv(timeout=TIMEOUT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(found["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(found["exceptionDetails"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(found["entry"]["text"])

    def open(self, url: str) -> None:
        """Go there and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href == {url!r} && document.readyState == 'complete'")

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until it is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.ask(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """A key, by the name that events have."""
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "End": 35, "Home": 36, "Tab": 9}
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
            )

    def show(self, width: int, height: int, scheme: str = "light") -> None:
        """As a window of this size on a light or dark desktop."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        """What the window shows, as WebP."""
        shot = self.call("Page.captureScreenshot", format="webp", quality=80)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(program: str, folder: Path) -> Iterator[Browser]:
    """A browser of its own, gone when the block ends.

    Args:
        program: Path of Chromium.
        folder: Empty; it keeps its profile there.
    """
    command = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield Browser(_address(process, folder / "DevToolsActivePort"))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _address(process: subprocess.Popen[bytes], port_file: Path) -> str:
    """Of its first tab."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if port_file.is_file() and port_file.read_text().count("\n"):
            port = port_file.read_text().split("\n")[0]
            for tab in json.loads(http_get(f"http://127.0.0.1:{port}/json")):
                if tab["type"] == "page":
                    return tab["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise RuntimeError(f"Chromium did not start: see {port_file.parent}")
