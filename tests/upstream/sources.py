"""Python sources of upstream releases, fetched once from the package index into .cache/upstream.

Only source distributions, by name and hash (pins.toml), and only their Python files: nothing is built or installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import unittest
from pathlib import Path, PurePosixPath
from urllib.parse import urldefrag, urljoin

import httpx

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "upstream"


class SourcesError(unittest.SkipTest):
    """The package index is out of reach: what needs it is skipped, and the reason is shown at the end."""


def source_tree(distribution: str, version: str) -> Path:
    """A folder that has the package of that release, to be put on the path. Raises SourcesError."""
    name = f"{distribution}-{version}"
    tree = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (tree / "complete").exists():
            archive = fetch(f"{name}.tar.gz")
            _unpack(archive, distribution, tree)
            (tree / "complete").touch()
            archive.unlink()
    return tree


def installed_tree(package: str) -> Path:
    """As `source_tree`, of the installed release."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def fetch(file: str) -> Path:
    """Downloads a file. Raises SourcesError; ValueError when its content is not what was pinned."""
    project = file.rsplit("-", 1)[0]
    page = f"{(pip_setting('index-url') or 'https://pypi.org/simple').rstrip('/')}/{project}/"
    target = CACHE / file
    digest = hashlib.sha256()
    try:
        with httpx.Client(timeout=60, follow_redirects=True) as client:
            url = _link(client.get(page).raise_for_status().text, page, file)
            with client.stream("GET", url) as response, target.open("wb") as out:
                response.raise_for_status()
                for block in response.iter_bytes():
                    digest.update(block)
                    out.write(block)
    except httpx.HTTPError as error:
        raise SourcesError(f"{file} cannot be had from {page}: {error}") from error
    pinned = tomllib.loads(Path(__file__).with_name("pins.toml").read_text())["files"].get(file)
    if digest.hexdigest() != pinned:
        target.unlink()
        raise ValueError(f"{file} has the hash {digest.hexdigest()}, pinned is {pinned}")
    return target


def pip_setting(name: str) -> str:
    """What pip would take; empty: its default."""
    if value := os.environ.get(f"PIP_{name.upper().replace('-', '_')}"):
        return value
    argv = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


def _link(html: str, page: str, file: str) -> str:
    """Return where an index page (PEP 503) has the file."""
    hrefs: list[str] = re.findall(r'<a\b[^>]*?\bhref="([^"]+)"', html)
    for href in hrefs:
        url = urldefrag(urljoin(page, href)).url
        if PurePosixPath(url).name == file:
            return url
    raise SourcesError(f"{page} does not list {file}")


def _unpack(archive: Path, package: str, into: Path) -> None:
    """Its Python files below the package's folder, wherever the archive has it."""
    shutil.rmtree(into, ignore_errors=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts[1:]
            if member.isfile() and member.name.endswith(".py") and parts[:1] == (package,):
                target = into.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                target.write_bytes(content.read())
