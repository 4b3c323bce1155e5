"""A headless Chromium, driven by its chromedriver over WebDriver (w3.org/TR/webdriver): JSON over HTTP.

Debian's packages: those of the machine, else unpacked into .cache/chromium and not installed, as Prometheus is.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from tests.cluster.machine import CACHE, PackageSet, unpacked
from tests.launch.deployment import free_ports, wait_until

PACKAGES = PackageSet(
    ("chromium", "chromium-driver", "fonts-dejavu-core"), programs=("bin/chromium", "bin/chromedriver")
)
Scheme = Literal["light", "dark"]
DESKTOP, PHONE = 1280, 390
"""Pixels of width."""
_HEIGHT = 900
_SECONDS = 120
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # its own needs user namespaces, which a container may lack
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    # It asks nobody but us.
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass(frozen=True)
class Programs:
    """Where they are, and what they need to run there."""

    chromium: str
    chromedriver: str
    environment: dict[str, str]


def programs() -> Programs:
    """Raises LabError without a route to a mirror."""
    installed = shutil.which("chromium"), shutil.which("chromedriver")
    if installed[0] and installed[1]:
        return Programs(installed[0], installed[1], {})
    root = unpacked(CACHE.parent / "chromium", PACKAGES)
    lib, fonts = root / "usr/lib", root.parent / "fonts.conf"
    # What the machine has installed already is not fetched: fonts may be in either place.
    folders = "".join(f"<dir>{usr}/share/fonts</dir>" for usr in (root / "usr", Path("/usr")))
    fonts.write_text(f"<fontconfig>{folders}<cachedir>{root.parent}/fonts</cachedir></fontconfig>\n")
    # Of pulseaudio: libpulse finds its other half by a path that is only right where it is installed.
    libraries = [str(folder) for under in ("*-linux-gnu*", "*-linux-gnu*/pulseaudio") for folder in lib.glob(under)]
    return Programs(
        # Not bin/chromium: a script that reads /etc/chromium.d.
        str(root / "usr/lib/chromium/chromium"),
        str(root / "usr/bin/chromedriver"),
        {"LD_LIBRARY_PATH": ":".join(libraries), "FONTCONFIG_FILE": str(fonts)},
    )


class Page:
    """A page that is open."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client = client
        self._session = f"/session/{session}"

    def run(self, script: str) -> Any:
        """What the body of a function returns in the page."""
        return self._post("/execute/sync", {"script": script, "args": []})

    def screenshot(self, file: Path) -> None:
        """Of the whole page, as PNG."""
        size = self.run("const e = document.documentElement; return [e.clientWidth, e.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        shot = self.devtools("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, file: Path) -> None:
        self._post("/url", {"url": file.absolute().as_uri()})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._client.post(self._session + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]


@contextmanager
def opened(file: Path, width: int, scheme: Scheme) -> Iterator[Page]:
    """A file in a window of that width, for a reader with that setting."""
    with _driver() as (client, chromium):
        capabilities = {
            "goog:chromeOptions": {
                "binary": chromium,
                "args": list(_OPTIONS),
                "mobileEmulation": {"deviceMetrics": {"width": width, "height": _HEIGHT, "pixelRatio": 1}},
            }
        }
        answer = client.post("/session", json={"capabilities": {"alwaysMatch": capabilities}})
        assert answer.status_code == 200, answer.text
        session = answer.json()["value"]["sessionId"]
        try:
            page = Page(client, session)
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            page.devtools("Emulation.setEmulatedMedia", features=media)
            page.open(file)
            yield page
        finally:
            client.delete(f"/session/{session}")


@contextmanager
def _driver() -> Iterator[tuple[httpx.Client, str]]:
    found = programs()
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as home:
        # Profile, caches and sockets of the browser go away with it.
        environment = os.environ | found.environment | {"HOME": home, "TMPDIR": home, "XDG_CONFIG_HOME": home}
        with (
            subprocess.Popen(
                [found.chromedriver, f"--port={port}"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as driver,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_SECONDS, trust_env=False) as client,
        ):
            try:
                wait_until("chromedriver answers", lambda: _answers(client), _SECONDS)
                yield client, found.chromium
            finally:
                driver.terminate()


def _answers(client: httpx.Client) -> bool:
    try:
        return bool(client.get("/status").json()["value"]["ready"])
    except httpx.TransportError:
        return False
