"""A headless Chromium with one page, spoken to over the DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse

from tests.support.conditions import eventually

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_DEADLINE_S = 30.0
DEADLINE_S = 20.0
PERIOD_S = 0.1

_FLAGS = (
    "--headless",
    "--no-sandbox",  # in a container the tests are root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)


def find_browser() -> str:
    """The path of a Chromium; without one the test is skipped."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser on this machine: looked for {', '.join(NAMES)}")
    return found


class Page:
    """The browser's page.

    Attributes:
        complaints: what the page's script threw, and what the browser refused to load or run.
    """

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []

    async def open(self, url: str) -> Self:
        """Go to an address, and wait until the page is there."""
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable")
        await self._call("Page.navigate", url=url)
        await self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")
        return self

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        answer = await self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """The expression's value as soon as it is true; fails when it takes too long."""
        value: Any = None

        async def holds() -> bool:
            nonlocal value
            value = await self.evaluate(expression)
            return bool(value)

        await eventually(holds, what=expression, recheck_s=PERIOD_S)
        return value

    async def screenshot(
        self, width: int, height: int, *, dark: bool = False, scale: float = 1
    ) -> bytes:
        """A PNG of the page in a window of this size."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self._call("Emulation.setEmulatedMedia", features=scheme)
        await self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        answer = await self._call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == self._number:
                    assert "error" not in message, message["error"]
                    return dict(message["result"])
                self._notice(message)

    def _notice(self, message: dict[str, Any]) -> None:
        if message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded":
            self.complaints.append(str(message["params"]["entry"]))


@asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Page]:
    """A browser while the context lasts, with its profile in an empty folder."""
    browser = await asyncio.create_subprocess_exec(
        find_browser(),
        *_FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/json/list") as answer:
                pages = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(
                pages[0]["webSocketDebuggerUrl"], max_msg_size=0
            ) as socket:
                yield Page(socket)
    finally:
        browser.terminate()
        await browser.wait()


async def _port(file: Path) -> int:
    """Return the port that the browser listens on, which it writes into its profile."""
    await eventually(
        lambda: _read(file).count("\n"),
        deadline_s=START_DEADLINE_S,
        what="a browser",
        recheck_s=PERIOD_S,
    )
    return int(_read(file).splitlines()[0])


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""
