"""The main that stands in for LMCache's missing plugin system: patches or an end with the reason, then the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.errors import StartError
from pdserve.patches.lmcache.host_memory import step_bytes

MAIN = "pdserve.patches.lmcache_server_main"
ROOT = Path(__file__).parents[2]
SERVER = """\
import json, multiprocessing, sys
if __name__ == "__main__":
    print(json.dumps([sys.argv[0], sys.argv[1:], sys.modules["__main__"].__spec__.name]))
    sys.exit(3)
"""


@pytest.fixture
def lmcache(tmp_path: Path) -> Path:
    """A folder with a package that has LMCache's name, a server module that tells its argv, and nothing else."""
    package = tmp_path / "site" / "lmcache" / "v1" / "multiprocess"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "http_server.py").write_text(SERVER)
    return tmp_path / "site"


def run(site: Path, patches: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "PDSERVE_PATCHES": patches}
    return subprocess.run([sys.executable, "-m", MAIN, *argv], env=env, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_it_becomes_the_servers_own_main_with_the_same_argv_and_exit_code(lmcache: Path) -> None:
    done = run(lmcache, "", "--port", "5555", "--l1-size-gb", "1")
    program, argv, module = json.loads(done.stdout)
    assert program.endswith("lmcache/v1/multiprocess/http_server.py")
    assert argv == ["--port", "5555", "--l1-size-gb", "1"]
    assert module == "lmcache.v1.multiprocess.http_server"
    assert done.returncode == 3


@pytest.mark.process
def test_a_patch_that_cannot_be_applied_ends_it_with_the_reason_before_the_server_runs(lmcache: Path) -> None:
    name = "lmcache-demand-pinned"
    step = {"LMCACHE_ROCM_DEMAND_PINNED_STEP_GB": "lots"}
    done = run(lmcache, name, **step, PDSERVE_PATCHES_ALLOW_UNKNOWN=name)
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.strip().splitlines()[-1] == (
        "StartError: LMCACHE_ROCM_DEMAND_PINNED_STEP_GB=lots is not a positive number of GiB"
    )


def test_the_step_is_a_number_of_gib_and_one_that_is_none_is_refused() -> None:
    sizes = {None: 64 << 30, "": 64 << 30, "8": 8 << 30, "0.5": 1 << 29}
    assert {text: step_bytes(text) for text in sizes} == sizes
    for text in ("0", "-1", "many", "nan", "inf"):
        with pytest.raises(StartError, match="LMCACHE_ROCM_DEMAND_PINNED_STEP_GB"):
            step_bytes(text)
