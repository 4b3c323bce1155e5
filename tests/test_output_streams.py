"""What a verb ends in when its output goes to a full disk, or to a stream that is closed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.launch.deployment import PDSERVE, execute

pytestmark = pytest.mark.process


def shell(redirection: str, *arguments: str, home: Path, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    env = {"PDSERVE_HOME": str(home), "PYTHONUNBUFFERED": unbuffered}
    return execute("/bin/sh", "-c", f'"$@" {redirection}', "sh", *PDSERVE, *arguments, env=env)


@pytest.mark.parametrize(("verb", "unbuffered"), [("--version", ""), ("schema", "1")])
def test_a_full_disk_below_stdout_is_an_error(verb: str, unbuffered: str, tmp_path: Path) -> None:
    done = shell(">/dev/full", verb, home=tmp_path, unbuffered=unbuffered)
    assert done.returncode == 8, done.stderr
    assert done.stderr.startswith("error: stdout: the output cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("redirection", "arguments", "code"),
    [
        (">&-", ("schema",), 0),
        ("2>/dev/full", ("status",), 8),
        ("<&- >&- 2>&-", ("status",), 8),
        ("<&- >&- 2>&-", ("schema",), 0),
    ],
)
def test_a_closed_stream_is_no_error(redirection: str, arguments: tuple[str, ...], code: int, tmp_path: Path) -> None:
    done = shell(redirection, *arguments, home=tmp_path)
    assert (done.returncode, done.stderr) == (code, "")
