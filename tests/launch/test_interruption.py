"""Ctrl-C at moments when no launcher runs yet or any more: no traceback, and nothing is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.deployment import LINE_SECONDS, REPOSITORY, recipe
from tests.launch.test_keys import keys, struck

pytestmark = pytest.mark.process

STRUCK_IN_AN_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command has it ignored
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Strike())
sys.argv = ["pdserve", "list"]
from pdserve.cli.main import main
main()
"""
STRUCK_IN_A_CLASS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Attribute:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGINT)
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == "pdserve.run.retention":
            type("Owner", (), {"attribute": Attribute()})
sys.meta_path.insert(0, Strike())
sys.argv = ["pdserve", "list"]
from pdserve.cli.main import main
main()
"""
STRUCK_AT_THE_END = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["pdserve", "--version"]
from pdserve.cli.main import main
main()
"""


def ended(script: str) -> tuple[bool, str]:
    """Whether that ended as a Ctrl-C ends a command (a shell shows 130 for the signal too); and its error output."""
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=LINE_SECONDS)
    return done.returncode in (130, -signal.SIGINT), done.stderr


@pytest.mark.parametrize("module", ["typer", "pdserve.errors", "pdserve.cli.listing", "pdserve.run.retention"])
def test_a_command_that_still_imports_ends_without_a_word(pdserve_home: Path, module: str) -> None:
    assert ended(STRUCK_IN_AN_IMPORT.format(module=module)) == (True, "")


def test_so_does_one_that_makes_its_classes(pdserve_home: Path) -> None:
    assert ended(STRUCK_IN_A_CLASS) == (True, "")


def test_so_does_one_that_has_done_its_work(pdserve_home: Path) -> None:
    assert ended(STRUCK_AT_THE_END) == (True, "")


@pytest.mark.parametrize(("function", "late"), [("look", True), ("record_run", True), ("run_here", False)])
def test_an_up_that_has_started_nothing_leaves_no_folder(
    tmp_path: Path, pdserve_home: Path, function: str, late: bool
) -> None:
    assert struck(function, "SIGINT", recipe(tmp_path), late=late) == 130
    assert list(pdserve_home.glob("*/*")) == []
    assert keys() == []
