"""What `pdserve` does where its surroundings lack something: a home, a current folder, room on the disk, UTF-8."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdserve.run.directory import RunDir
from tests.launch.deployment import PDSERVE, execute, recipe

pytestmark = pytest.mark.process

NO_UTF_8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""As a locale with another encoding: which of those are installed differs."""


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from pdserve.cli.main import main
sys.argv = ["pdserve", *sys.argv[2:]]
main()
"""
"""`pdserve`, where no file may have more bytes than that."""


def test_without_a_home_the_error_names_the_variable_to_set() -> None:
    command = ("unshare", "--user", "--map-user=54321", *PDSERVE, "list")
    lacks = dict.fromkeys(("HOME", "PDSERVE_HOME", "XDG_STATE_HOME"))
    done = execute(*command, env={**lacks, "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 8, done.stderr
    assert done.stderr.startswith("error: there is no folder for deployments")
    assert "set PDSERVE_HOME" in done.stderr


@pytest.mark.parametrize("room", [0, 60])
@pytest.mark.full
def test_a_key_for_which_the_disk_has_no_room_leaves_the_file_as_it_was(tmp_path: Path, room: int) -> None:
    """`room`: bytes; a new line has more."""
    file = tmp_path / "keys"
    assert execute(*PDSERVE, "new-key", "first", "--file", str(file)).returncode == 0
    before = file.read_bytes()
    key = ("--file", str(file), "--max-requests", "123456", "--priority", "5")
    done = execute(sys.executable, "-c", LIMITED, str(len(before) + room), "new-key", "second", *key)
    assert (done.returncode, done.stdout) == (2, ""), "no key that nobody knows"
    assert "the key cannot be saved" in done.stderr
    assert file.read_bytes() == before


def test_a_start_whose_record_finds_no_room_is_an_error_with_its_fix(tmp_path: Path, pdserve_home: Path) -> None:
    done = execute(sys.executable, "-c", LIMITED, "100", "up", recipe(tmp_path), "--detach")
    assert done.returncode == 8, done.stderr
    assert "the record of this run cannot be written" in done.stderr
    assert "make room there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_a_locale_without_utf_8_serves(tmp_path: Path, pdserve_home: Path) -> None:
    """The commands of the README, with text in the recipe that ASCII does not have."""
    (tmp_path / "größe").mkdir()
    file = str(recipe(tmp_path / "größe", name="fake", decode__env={"GRUSS": "grüß dich →"}))

    def succeed(*arguments: str, code: int = 0) -> str:
        done = execute(*PDSERVE, *arguments, env=NO_UTF_8)
        assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (code, False), done.stdout + done.stderr
        return done.stdout

    for before in (("validate", file), ("render", file), ("up", file, "--dry-run"), ("schema",), ("patches",)):
        succeed(*before)
    try:
        succeed("up", file, "--detach")
        for meanwhile in (("status",), ("status", "--json"), ("list",), ("logs", "-n", "5")):
            succeed(*meanwhile)
        home = RunDir((pdserve_home / "fake" / "current").resolve())
        decode = home.read_state().processes["decode-0"].id
        assert decode is not None
        assert "GRUSS=grüß dich →".encode() in Path(f"/proc/{decode.pid}/environ").read_bytes().split(b"\0")
    finally:
        succeed("down")
