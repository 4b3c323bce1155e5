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


@pytest.fixture
def bad_compiler(tmp_path: Path) -> str:
    """It is there, and it compiles nothing: a gcc without the C library's headers."""
    return f"{sys.executable} -c {shlex.quote(CANNOT)}"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PDSERVE_COMPILE": "0"}, ""),
        ({"CC": "/nowhere/cc"}, "there is no /nowhere/cc: the proxy is not compiled"),
        ({"CC": "bad_compiler"}, "cannot compile for Python.h (cc1: no headers at all): the proxy is not compiled"),
    ],
    ids=["asked", "no-compiler", "bad-compiler"],
)
def test_no_compiler_is_no_error(environment: dict[str, str], message: str, bad_compiler: str, tmp_path: Path) -> None:
    done = build(tmp_path, {name: value.replace("bad_compiler", bad_compiler) for name, value in environment.items()})
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = ZipFile(wheel).namelist()
    assert "pdserve/pd/relay/leg.py" in names
    assert not [name for name in names if name.endswith(".so")]
    assert message in done.stdout + done.stderr
    assert bool(message) == ("is not compiled" in done.stdout + done.stderr)


@pytest.mark.parametrize("cc", ["", " "])
def test_an_empty_cc_is_none(cc: str) -> None:
    argv = [sys.executable, "-c", "import hatch_build; print(hatch_build._lacking())"]
    done = subprocess.run(argv, cwd=ROOT, env={**os.environ, "CC": cc}, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


def test_extension_modules_that_lie_about_are_not_packed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks"))
    (source / "pdserve" / "pd" / "leg.cpython-311-x86_64-linux-gnu.so").write_bytes(b"old")
    done = build(tmp_path, {"PDSERVE_COMPILE": "0"}, source)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert not [name for name in ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PDSERVE_COMPILE": "1", "CC": "/nowhere/cc"}, "there is no /nowhere/cc, and PDSERVE_COMPILE=1 asks for"),
        ({"PDSERVE_COMPILE": "yes"}, "PDSERVE_COMPILE is 0 or 1, not 'yes'"),
    ],
    ids=["no-compiler", "neither"],
)
def test_a_build_that_cannot_be_as_asked_ends(environment: dict[str, str], message: str, tmp_path: Path) -> None:
    done = build(tmp_path, environment)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))
