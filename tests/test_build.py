"""What a build of pdserve makes where it cannot or may not compile. scripts/test makes and tests a compiled one."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]


def build(folder: Path, environment: Mapping[str, str], source: Path = ROOT) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    return subprocess.run(
        [*argv, "--verbose", "--wheel-dir", str(folder), str(source)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


CANNOT = "import sys; sys.exit('cc1: no headers at all')"


def made_of(done: subprocess.CompletedProcess[str], folder: Path) -> list[str]:
    """Return the names in the only wheel, which is one for every platform."""
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    return ZipFile(wheel).namelist()


def test_a_compiler_that_compiles_nothing_is_no_error(tmp_path: Path) -> None:
    """It is there: a gcc without the C library's headers."""
    done = build(tmp_path, {"CC": f"{sys.executable} -c {shlex.quote(CANNOT)}"})
    assert "pdserve/pd/relay/leg.py" in made_of(done, tmp_path)
    assert (
        "cannot compile for Python.h (cc1: no headers at all): the proxy is not compiled" in done.stdout + done.stderr
    )


def test_extension_modules_that_lie_about_are_not_packed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks"))
    (source / "pdserve" / "pd" / "leg.cpython-311-x86_64-linux-gnu.so").write_bytes(b"old")
    done = build(tmp_path, {"PDSERVE_COMPILE": "0"}, source)
    assert not [name for name in made_of(done, tmp_path) if name.endswith(".so")]
    assert "is not compiled" not in done.stdout + done.stderr, "it was asked for"


def test_a_build_that_cannot_be_as_asked_ends(tmp_path: Path) -> None:
    done = build(tmp_path, {"PDSERVE_COMPILE": "1", "CC": "/nowhere/cc"})
    assert done.returncode != 0
    assert "there is no /nowhere/cc, and PDSERVE_COMPILE=1 asks for" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))
