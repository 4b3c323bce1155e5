"""The main that stands in for LMCache's missing plugin system: patches or an end with the reason, then the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from pdserve.errors import StartError
from pdserve.patches.lmcache.host_memory import step_bytes
from pdserve.patches.record import read_records

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


@pytest.mark.real
def test_the_real_server_runs_with_the_patches_and_reports_them(tmp_path: Path) -> None:
    """On a CPU it pins nothing, so they have nothing to do; that they are active is what is proven here."""
    env = {
        **os.environ,
        "PDSERVE_PATCHES": "lmcache-demand-pinned,lmcache-final-capacity",
        "PDSERVE_PATCH_RECORD": str(tmp_path / "patches"),
        "LMCACHE_TRACK_USAGE": "false",
    }
    argv = ["--host", "127.0.0.1", "--port", "25955", "--http-host", "127.0.0.1", "--http-port", "25956"]
    argv += ["--l1-size-gb", "1", "--no-l1-use-lazy", "--eviction-policy", "LRU", "--instance-id", "patched"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", MAIN, *argv], env=env, stdout=log, stderr=log, cwd=ROOT)
    try:
        status = answer(server, "http://127.0.0.1:25956/status")
        (record,) = read_records(tmp_path / "patches")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    assert (record.kind, record.pid) == ("lmcache-server", server.pid)
    assert record.active == ("lmcache-demand-pinned", "lmcache-final-capacity")
    assert status["storage_manager"]["l1_manager"]["memory_total_bytes"] == 1 << 30


def answer(server: subprocess.Popen[bytes], url: str) -> dict[str, dict[str, dict[str, int]]]:
    """Return what the server says once it answers."""
    deadline = time.monotonic() + 300
    with httpx.Client(trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            assert server.poll() is None, "the server has ended"
            try:
                document: dict[str, dict[str, dict[str, int]]] = client.get(url).raise_for_status().json()
            except httpx.TransportError:
                time.sleep(0.2)
                continue
            return document
    raise TimeoutError(url)
