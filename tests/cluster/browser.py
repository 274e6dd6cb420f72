"""A headless Chromium for tests, driven over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-extensions", "--remote-debugging-pipe",
            "--hide-scrollbars"]  # fmt: skip
_ANSWER_S = 60.0


class Tab:
    """One page of the browser."""

    def __init__(self, asks: int, answers: int) -> None:
        self._asks, self._answers, self._came, self._last = asks, answers, b"", 0
        self.errors: list[str] = []  # what the page wrote to its console, and what it threw
        self.requests: list[str] = []
        self._session: dict[str, str] = {}
        made = self.ask("Target.createTarget", url="about:blank")
        attached = self.ask("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol."""
        self._last += 1
        told = json.dumps({"id": self._last, "method": method, "params": params, **self._session})
        os.write(self._asks, told.encode() + b"\0")
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until:
            message = self._next()
            if message.get("id") == self._last:
                assert "error" not in message, message
                answer: dict[str, Any] = message["result"]
                return answer
            self._note(message)
        raise TimeoutError(method)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._came:
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has ended"
            self._came += more
        one, _, self._came = self._came.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.errors.append(json.dumps(params))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def look_like(self, width: int, height: int, scheme: str) -> None:
        """Take a size in CSS pixels and a colour scheme: light or dark."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        until(lambda: self.evaluate(expression), _ANSWER_S, expression)

    def picture(self, path: Path) -> None:
        """Write the whole page as PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium() -> Iterator[Tab]:
    """A browser with one empty tab."""
    assert CHROMIUM is not None
    from_us, asks = os.pipe()
    answers, to_us = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def as_it_expects() -> None:
            os.dup2(from_us, 103)
            os.dup2(to_us, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        process = subprocess.Popen(
            [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=as_it_expects,
        )  # fmt: skip
        os.close(from_us)
        os.close(to_us)
        try:
            yield Tab(asks, answers)
        finally:
            with suppress(OSError):
                os.close(asks)
            process.kill()
            process.wait()
            os.close(answers)
