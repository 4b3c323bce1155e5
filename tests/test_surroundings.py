"""What `pdserve` does where its surroundings lack something: a home, a current folder, room on the disk, UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pdserve.run.directory import RunDir
from pdserve.system.shared_memory import ShmLedger
from tests.launch.deployment import REPOSITORY, pdserve, recipe

pytestmark = pytest.mark.process

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
PDSERVE = [sys.executable, "-m", "pdserve.cli.main"]
NO_UTF_8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""As a locale with another encoding: which of those are installed differs."""


def run(
    *argv: str, cwd: Path = REPOSITORY, environ: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """`environ`: None removes."""
    env: dict[str, str | None] = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(environ or {})}
    given = {name: value for name, value in env.items() if value is not None}
    return subprocess.run(argv, cwd=cwd, env=given, capture_output=True, text=True, check=False, timeout=300)


def test_without_a_home_the_error_names_the_variable_to_set() -> None:
    command = ("unshare", "--user", "--map-user=54321", *PDSERVE, "list")
    lacks = dict.fromkeys(("HOME", "PDSERVE_HOME", "XDG_STATE_HOME"))
    done = run(*command, environ={**lacks, "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 8, done.stderr
    assert done.stderr.startswith("error: there is no folder for deployments")
    assert "set PDSERVE_HOME" in done.stderr


@pytest.mark.parametrize("variable", ["PDSERVE_HOME", "XDG_STATE_HOME"])
@pytest.mark.full
def test_a_relative_home_in_a_folder_that_was_removed_is_an_error_with_its_fix(tmp_path: Path, variable: str) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    names = ("PDSERVE_HOME", "XDG_STATE_HOME")
    environ = {name: "runs" if name == variable else None for name in names}
    done = run("sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *PDSERVE, "list", cwd=gone, environ=environ)
    assert done.returncode == 8, done.stderr
    assert "the current folder was removed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("room", [0, 1, 60, 100])
@pytest.mark.full
def test_a_key_for_which_the_disk_has_no_room_leaves_the_file_as_it_was(tmp_path: Path, room: int) -> None:
    """`room`: bytes; a new line has more."""
    file = tmp_path / "keys"
    assert run(*PDSERVE, "new-key", "first", "--file", str(file)).returncode == 0
    before = file.read_bytes()
    limited = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + room}, resource.RLIM_INFINITY))
from pdserve.cli.main import main
sys.argv = ["pdserve", "new-key", "second", "--file", {str(file)!r}, "--max-requests", "123456", "--priority", "5"]
main()
"""
    done = run(sys.executable, "-c", limited)
    assert (done.returncode, done.stdout) == (2, ""), "no key that nobody knows"
    assert "the key cannot be saved" in done.stderr
    assert file.read_bytes() == before


def test_a_start_whose_record_finds_no_room_is_an_error_with_its_fix(tmp_path: Path, pdserve_home: Path) -> None:
    limited = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
from pdserve.cli.main import main
sys.argv = ["pdserve", "up", {str(recipe(tmp_path))!r}, "--detach"]
main()
"""
    done = run(sys.executable, "-c", limited)
    assert done.returncode == 8, done.stderr
    assert "the record of this run cannot be written" in done.stderr
    assert "make room there" in done.stderr
    assert "Traceback" not in done.stderr


@as_root
@pytest.mark.parametrize("files", [11, 12, 13, 14])
@pytest.mark.full
def test_an_up_on_a_full_disk_is_an_error_each_time(tmp_path: Path, pdserve_home: Path, files: int) -> None:
    """What finds no room differs: the place of the key, the lock, the state, the log of the agent."""
    pdserve_home.mkdir()
    disk = f'mount -t tmpfs -o mode=755,nr_inodes={files} none {pdserve_home} && "$@"; "$@"; exit $?'
    done = run("unshare", "--mount", "sh", "-c", disk, "sh", *PDSERVE, "up", str(recipe(tmp_path)))
    assert done.returncode == 8, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert done.stderr.count("No space left on device") == 2
    assert done.stderr.count("make room ") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_names_of_folders_move_no_terminal(tmp_path: Path, pdserve_home: Path) -> None:
    name = "fake\x1b]52;c;aGk=\x07"
    RunDir.create(pdserve_home, name, "r1").point_current()
    code, output = pdserve("list")
    assert (code, "\x1b" in output, "\x07" in output) == (0, False, False)
    assert "fake\\x1b]52;c;aGk=\\x07" in output
    assert json.loads(pdserve("list", "--json")[1])[0]["name"] == name


@pytest.mark.full
def test_logs_of_two_agents_have_two_labels(pdserve_home: Path) -> None:
    run = RunDir.create(pdserve_home, "fake", "r1")
    run.point_current()
    for name in ("agent@a", "agent@b", "proxy@a"):
        (run.logs / f"{name}.log").write_text(f"of {name}\n")
    everything = ["agent@a      | of agent@a", "agent@b      | of agent@b", "proxy        | of proxy@a"]
    assert pdserve("logs")[1].splitlines() == everything
    assert pdserve("logs", "agent")[1].splitlines() == everything[:2]
    assert pdserve("logs", "agent@b")[1] == "of agent@b"
    assert pdserve("logs", "proxy")[1] == "of proxy@a"
    code, output = pdserve("logs", "nothing")
    assert (code, "one of: agent@a, agent@b, proxy" in output) == (8, True)


@pytest.mark.full
def test_a_locale_without_utf_8_serves(tmp_path: Path, pdserve_home: Path) -> None:
    """The commands of the README, with text in the recipe that ASCII does not have."""
    (tmp_path / "größe").mkdir()
    file = str(recipe(tmp_path / "größe", name="fake", decode__env={"GRUSS": "grüß dich →"}))

    def succeed(*arguments: str, code: int = 0) -> str:
        done = run(*PDSERVE, *arguments, environ=NO_UTF_8)
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


SAVES = """
import resource, sys
from pathlib import Path
from pdserve.system.shared_memory import ShmLedger

ledger = ShmLedger(Path(sys.argv[1]), strangers={f"psm_{number}": number for number in range(20_000)})
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
print("up", flush=True)
while True:
    ledger.save()
"""


@pytest.mark.full
def test_a_ledger_that_two_write_at_once_is_never_torn(tmp_path: Path) -> None:
    """The launcher that clears up, and a `down` beside it; and one of the two has no room for all of it."""
    file = tmp_path / "shm@n.json"
    argv = [sys.executable, "-c", SAVES, str(file)]
    writers = [subprocess.Popen([*argv, room], stdout=subprocess.PIPE, cwd=REPOSITORY) for room in ("1000", "1000000")]
    try:
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        while not file.exists():
            pass
        sizes = {len(json.loads(file.read_bytes())["strangers"]) for _ in range(300)}
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert sizes == {20_000}
    assert ShmLedger(file)._strangers["psm_7"] == 7
