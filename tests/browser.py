"""Debian's chromium, headless, by its DevTools protocol: a page at a size and in a colour scheme, measured and drawn.

Headless windows have a least width of some 500 pixels; emulation has not.
"""

import asyncio
import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PHONE, DESKTOP = (390, 844), (1280, 900)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-port=0"
)


class Browser:
    """A running chromium."""

    def __init__(self, port: int):
        self._port = port

    def look(
        self,
        address: str,
        script: str = "1",
        *,
        size: tuple[int, int] = DESKTOP,
        dark: bool = False,
        picture: Path | None = None,
        until: str = "true",
    ) -> Any:
        """What `script` answers (JSON) in a page once `until` holds; the whole page goes to `picture`."""
        return asyncio.run(self._look(address, script, size, dark, picture, until))

    async def _look(
        self, address: str, script: str, size: tuple[int, int], dark: bool, picture: Path | None, until: str
    ) -> Any:
        new = urllib.request.Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")
        page = json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(new, timeout=60).read()))
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket,
        ):
            sent = 0

            async def ask(method: str, **fields: Any) -> Any:
                nonlocal sent
                sent += 1
                await socket.send_json({"id": sent, "method": method, "params": fields})
                while (answer := await socket.receive_json(timeout=120)).get("id") != sent:
                    pass
                assert "error" not in answer, answer
                return answer["result"]

            async def evaluate(text: str) -> Any:
                told = await ask(
                    "Runtime.evaluate", expression=text, returnByValue=True, awaitPromise=True, userGesture=True
                )
                assert "exceptionDetails" not in told, told
                return told["result"].get("value")

            width, height = size
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            await ask("Emulation.setDeviceMetricsOverride", **metrics)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            await ask("Emulation.setEmulatedMedia", features=[scheme])
            await ask("Emulation.setFocusEmulationEnabled", enabled=True)  # as if a person looked at it
            await ask("Page.navigate", url=address)
            deadline = time.monotonic() + 100
            while not await evaluate(
                f"document.readyState === 'complete' && location.href !== 'about:blank' && ({until})"
            ):
                assert time.monotonic() < deadline, f"{address}: never came to {until}"
                await asyncio.sleep(0.1)
            answer = await evaluate(script)
            if picture:
                shot = await ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
                picture.write_bytes(base64.b64decode(shot["data"]))
            await ask("Page.close")
            return answer


@contextmanager
def browser(place: Path) -> Iterator[Browser]:
    """A chromium with a profile in `place`; skips where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    process = subprocess.Popen([program, *FLAGS.split(), f"--user-data-dir={place}"], stderr=subprocess.DEVNULL)
    try:
        told, deadline = place / "DevToolsActivePort", time.monotonic() + 100
        while not (told.exists() and told.read_text().count("\n")):
            assert process.poll() is None, "chromium has ended instead of starting"
            assert time.monotonic() < deadline, "chromium has not answered"
            time.sleep(0.1)
        yield Browser(int(told.read_text().split("\n")[0]))
    finally:
        process.terminate()
        process.wait(20)
