"""What this machine lacks is said before anything starts: the value, the need, the fix; exit code 3."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest

from pdserve.errors import PreflightError
from pdserve.lmcache_server import check_memory, registered_workers
from pdserve.plan.model import LmcacheServer
from pdserve.system.host import MemoryFacts
from tests.launch.deployment import PDSERVE, execute, pdserve, recipe
from tests.tables import each_row

pytestmark = pytest.mark.process

GIB = 1 << 30


def server(gib: float, *, shm: str | None = None, kv_gib: float = 0) -> LmcacheServer:
    return LmcacheServer(
        process="lmcache-0",
        http_url="http://127.0.0.1:1",
        instance_id="run-lmcache-0",
        engines=("prefill-0",),
        expected_workers=1,
        l1_bytes=int(gib * GIB),
        shm_name=shm,
        kv_bytes_on_host=int(kv_gib * GIB),
    )


def facts(available: float, *, shm: float = 1000, limit: float | None = None) -> MemoryFacts:
    return MemoryFacts(int(available * GIB), int(shm * GIB), None if limit is None else int(limit * GIB))


@each_row("servers, memory", [
    ([server(10)], facts(20)),
    ([server(10)], facts(20, shm=0)),
    ([server(10, shm="pool")], facts(20, shm=11)),
    ([server(10, kv_gib=5)], facts(20, shm=6)),
    ([], facts(0)),
])  # fmt: skip
def test_enough_memory(servers: list[LmcacheServer], memory: MemoryFacts) -> None:
    check_memory(servers, memory)


@each_row("servers, memory, message", [
    ([server(30)], facts(20), "needs 30.0 GiB of memory, 20.0 GiB are available"),
    ([server(15), server(15)], facts(20), "needs 30.0 GiB"),
    ([server(10)], facts(20, limit=5), "the cgroup allows 5.0 GiB more"),
    ([server(10, shm="pool")], facts(20, shm=2), "need 10.0 GiB in /dev/shm, 2.0 GiB are free"),
    ([server(10, kv_gib=5)], facts(20, shm=4), "need 5.0 GiB in /dev/shm"),
])  # fmt: skip
def test_too_little_memory(servers: list[LmcacheServer], memory: MemoryFacts, message: str) -> None:
    with pytest.raises(PreflightError, match=message):
        check_memory(servers, memory)


@each_row("status, count", [
    ({"registered_gpu_ids": [1, 2]}, 2),
    ({"registered_non_cuda_instance_ids": ["a"]}, 1),
    ({"registered_gpu_ids": [], "registered_non_cuda_instance_ids": None}, 0),
    ({}, 0),
])  # fmt: skip
def test_workers_of_both_transfer_modes_count(status: dict[str, object], count: int) -> None:
    assert registered_workers(status) == count


def test_a_model_folder_that_does_not_exist_is_named_with_its_line(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "path:" in text)
    (tmp_path / "model" / "config.json").unlink()
    code, output = pdserve("up", file)
    assert code == 3
    assert f"{file}:{line}" in output
    assert "has no config.json" in output


@pytest.mark.parametrize(
    ("section", "content", "message"),
    [
        ({"auth": {"keys_file": "f"}}, '{"name": "a"}', "missing required field `sha256`"),
        ({"admin": {"port": 1, "token_file": "f"}}, "short", "the admin token has fewer than 16 characters"),
    ],
)
def test_a_file_of_the_proxy_that_it_could_not_use(
    tmp_path: Path, pdserve_home: Path, section: dict[str, object], content: str, message: str
) -> None:
    (tmp_path / "f").write_text(content)
    code, output = pdserve("up", recipe(tmp_path, proxy=section))
    assert (code, message in output, f"{tmp_path}/f" in output) == (3, True, True), output


def test_an_engine_that_does_not_exist(tmp_path: Path, pdserve_home: Path) -> None:
    code, output = pdserve("up", recipe(tmp_path, engine__command=["/nonexistent/vllm"]))
    assert (code, "/nonexistent/vllm is not an executable program" in output) == (3, True), output


def limited(*arguments: str | Path, files: int) -> tuple[int, str]:
    """`pdserve`, with so many open files."""
    done = execute(
        *PDSERVE,
        *arguments,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )
    return done.returncode, done.stdout


def test_up_refuses_what_preflight_refuses(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    code, preflight_output = limited("preflight", file, files=512)
    assert code == 3
    assert "failed: open-files" in preflight_output
    code, output = limited("up", file, "--set", "lmcache.l1_size_gb=900000", files=512)
    assert code == 3
    for text in ("2 checks failed", "open-files on", "soft 512, hard 512", "ulimit -n"):
        assert text in output
    assert "LMCache's L1 needs 900000.0 GiB of memory" in output
    assert "--set lmcache.l1_size_gb=" in output
    assert not pdserve_home.exists()


def test_up_warns_of_what_preflight_warns(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    _, preflight_output = limited("preflight", file, files=2048)
    [warning] = [line for line in preflight_output.splitlines() if line.startswith("warning: open-files")]
    # So that it stops before it starts anything.
    code, output = limited("up", file, "--set", "lmcache.l1_size_gb=900000", files=2048)
    assert code == 3
    assert warning in output
    assert "memory on" in output


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A cluster file with a machine that does not answer."""
    file = tmp_path / "hosts.yaml"
    file.write_text("schema: 1\nhosts: [{name: away}]\nssh: {options: ['ProxyCommand=false'], connect_seconds: 1}\n")
    return file


def test_a_dry_run_is_for_the_place_that_was_asked_for(tmp_path: Path, pdserve_home: Path, hosts: Path) -> None:
    code, output = pdserve("up", recipe(tmp_path), "--cluster", hosts, "--dry-run")
    assert code == 3
    assert "nothing can be started on away" in output
    for command in ("up", "preflight"):
        assert pdserve(command, recipe(tmp_path), "--cluster", hosts, "--this-machine")[0] == 2


def test_of_looks_at_a_silent_machine_only_the_last_one_stays(tmp_path: Path, pdserve_home: Path, hosts: Path) -> None:
    """Its error names a log there."""
    for verb in ("preflight", "up"):
        code, output = pdserve(verb, recipe(tmp_path), "--cluster", hosts)
        assert code == 3
        [folder] = (pdserve_home / "fake").iterdir()
        assert f"read {folder}/logs/probe@away.log" in output
        assert "nothing can be started on away" in (folder / "failure.md").read_text()
    assert pdserve("list", "--prune")[1].startswith(f"removed {folder} ")
    assert not folder.exists()
