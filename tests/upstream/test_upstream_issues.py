"""The reproductions of docs/upstream-issues.md do what the page says, on the installed vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.upstream
PAGE = Path(__file__).parents[2] / "docs" / "upstream-issues.md"
CASES = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
TITLES = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)


def test_every_issue_has_a_reproduction_that_shows_the_defect() -> None:
    """One after the other in one interpreter, because importing vLLM is what takes time."""
    done = subprocess.run(
        [sys.executable, "-c", "\nprint('---')\n".join(code for code, _ in CASES)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(CASES) == len(TITLES) >= 3
    assert dict(zip(TITLES, done.stdout.split("---\n"), strict=True)) == dict(
        zip(TITLES, (printed for _, printed in CASES), strict=True)
    )
