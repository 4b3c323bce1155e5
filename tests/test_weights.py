"""The download of a model, against a hub of our own on loopback: a real huggingface_hub, a real disk."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pdserve.logs.progress import describe
from pdserve.weights import CacheFolder
from tests.fakes.hub import COMMIT, FILES, Hub

pytestmark = pytest.mark.process

MODEL = "org/model"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(MODEL) as running:
        yield running


class FetchRun:
    """One run of the program."""

    def __init__(self, done: subprocess.CompletedProcess[str], record: Path) -> None:
        self.code, self.lines = done.returncode, done.stdout.splitlines()
        self.text = done.stdout
        self.record = json.loads(record.read_text()) if record.exists() else None


def command(home: Path, *arguments: str) -> list[str]:
    record = str(home / "record.json")
    return [sys.executable, "-m", "pdserve.weights", "--model", MODEL, "--record", record, *arguments]


def environment(home: Path, hub: Hub | None, extra: Mapping[str, str]) -> dict[str, str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    address = hub.url if hub is not None else "http://127.0.0.1:9"
    return {**outside, "HF_HOME": str(home / "hf"), "HF_ENDPOINT": address, "NO_PROXY": "*", "no_proxy": "*", **extra}


def fetch(home: Path, hub: Hub | None, *arguments: str, **env: str) -> FetchRun:
    """Runs the program to its end; without a hub nobody listens where it is looked for."""
    done = subprocess.run(
        command(home, *arguments), env=environment(home, hub, env), stdout=-1, stderr=-2, text=True, check=False
    )
    return FetchRun(done, home / "record.json")


def cache(home: Path) -> CacheFolder:
    return CacheFolder(home / "hf" / "hub", MODEL)


def present(home: Path) -> set[str]:
    snapshot = cache(home).snapshot(COMMIT)
    return {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}


def test_what_vllm_loads_is_fetched_and_reported(tmp_path: Path, hub: Hub) -> None:
    done = fetch(tmp_path, hub)
    assert (done.code, done.record) == (
        0,
        {
            "model": MODEL,
            "revision": "main",
            "commit": COMMIT,
            "size": sum(len(FILES[file]) for file in present(tmp_path)),
        },
    )
    assert present(tmp_path) == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model-1.safetensors",
        "model-2.safetensors",
    }, "neither other formats of the same weights nor files that the index does not name"
    assert (cache(tmp_path).snapshot(COMMIT) / "model-1.safetensors").read_bytes() == FILES["model-1.safetensors"]
    messages = [describe(line) for line in done.lines]
    assert f"2 of 5 files of {MODEL} at {COMMIT} are missing" in messages
    assert "fetched 0 % (0.0 of 0.0 GB)" in messages
    assert messages[-1] == f"0.0 GB complete at {COMMIT}"
    hub.served.clear()
    again = fetch(tmp_path, hub, "--revision", COMMIT)
    assert (again.code, hub.served) == (0, []), "a second run fetches nothing"
    assert again.record is not None
    assert again.record["revision"] == again.record["commit"] == COMMIT


def test_a_disk_that_is_too_small_is_seen_before_anything_large_is_fetched(tmp_path: Path, hub: Hub) -> None:
    hub.pretend["model-2.safetensors"] = 10**18
    done = fetch(tmp_path, hub)
    assert done.code == 1
    assert done.record is None
    assert "1000000000.0 GB must still be fetched" in done.lines[-1]
    assert "GB free" in done.lines[-1]
    assert "HF_HOME in engine.env" in done.lines[-1]
    assert "model-1.safetensors" not in hub.served


def test_a_revision_that_is_not_there(tmp_path: Path, hub: Hub) -> None:
    done = fetch(tmp_path, hub, "--revision", "v9")
    assert done.lines[-1] == f"weights: failed: the hub has {MODEL}, but no revision v9 -> correct model.revision"


def test_a_model_that_the_hub_does_not_show(tmp_path: Path, hub: Hub) -> None:
    hub.model = "org/other"
    assert f"gives out no model {MODEL} -> correct model.id" in fetch(tmp_path, hub).lines[-1]


def test_a_hub_that_is_down_is_named_with_what_is_lacking(tmp_path: Path) -> None:
    done = fetch(tmp_path, None)
    assert done.code == 1
    assert "http://127.0.0.1:9 cannot be reached" in done.lines[-1]
    assert f"{MODEL} at main is not in" in done.lines[-1]


@pytest.mark.parametrize("offline", [True, False], ids=["told so", "hub down"])
def test_without_the_hub_a_complete_cache_will_do(tmp_path: Path, hub: Hub, offline: bool) -> None:
    fetch(tmp_path, hub)
    done = fetch(tmp_path, None, **({"HF_HUB_OFFLINE": "1"} if offline else {}))
    assert done.code == 0, done.text
    assert done.record is not None
    assert done.record["commit"] == COMMIT


def test_without_the_hub_a_cache_that_lacks_a_file_will_not(tmp_path: Path, hub: Hub) -> None:
    fetch(tmp_path, hub)
    (cache(tmp_path).snapshot(COMMIT) / "model-2.safetensors").unlink()
    done = fetch(tmp_path, None, HF_HUB_OFFLINE="1")
    assert done.code == 1
    assert f"{COMMIT} lacks model-2.safetensors" in done.lines[-1]


def test_a_broken_index_is_an_error(tmp_path: Path, hub: Hub) -> None:
    fetch(tmp_path, hub)
    index = cache(tmp_path).snapshot(COMMIT) / "model.safetensors.index.json"
    index.write_bytes(b"x" * index.stat().st_size)
    done = fetch(tmp_path, None, HF_HUB_OFFLINE="1")
    assert done.code == 1
    assert f"failed: {index} is no index of weights" in done.lines[-1]
    assert f"remove {index.resolve()}" in done.lines[-1]
    index.resolve().unlink()
    assert fetch(tmp_path, hub).code == 0, "as the fix says"


def test_an_interrupted_download_goes_on_with_what_is_not_complete(tmp_path: Path, hub: Hub) -> None:
    hub.hold("model-2.safetensors")
    first = subprocess.Popen(command(tmp_path), env=environment(tmp_path, hub, {}), stdout=subprocess.DEVNULL)
    hub.wait_for("model-2.safetensors")
    while not (cache(tmp_path).snapshot(COMMIT) / "model-1.safetensors").exists():
        os.sched_yield()
    first.kill()
    first.wait()
    hub.release()
    hub.served.clear()
    assert fetch(tmp_path, hub).code == 0
    assert hub.served == ["model-2.safetensors"]


def test_a_download_that_does_not_move_ends(tmp_path: Path, hub: Hub) -> None:
    hub.hold("model-2.safetensors")
    done = fetch(tmp_path, hub, "--stall-seconds", "1")
    hub.release()
    assert done.code == 1
    assert "failed: nothing has come for 1 s" in done.lines[-1]


def test_two_nodes_with_one_cache_fetch_each_file_once(tmp_path: Path, hub: Hub) -> None:
    folder = cache(tmp_path)
    folder.lock.parent.mkdir(parents=True)
    with folder.lock.open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(
            command(tmp_path), env=environment(tmp_path, hub, {}), stdout=subprocess.PIPE, stderr=-2, text=True
        )
        assert second.stdout is not None
        assert "another process fetches into the same cache" in second.stdout.readline()
        assert "model-1.safetensors" not in hub.served
    rest, _ = second.communicate(timeout=300)
    assert f"complete at {COMMIT}" in rest
    assert sorted(hub.served) == sorted(set(hub.served))


def test_what_a_killed_download_left_is_removed_once_it_is_old(tmp_path: Path, hub: Hub) -> None:
    blobs = cache(tmp_path).path / "blobs"
    blobs.mkdir(parents=True)
    for name, age in (("a.0123abcd.incomplete", 3600), ("b.0123abcd.incomplete", 0), ("c.incomplete", 3600)):
        (blobs / name).write_bytes(b"x" * 9000)
        then = (blobs / name).stat().st_mtime - age
        os.utime(blobs / name, (then, then))
    assert fetch(tmp_path, hub).code == 0
    assert {path.name for path in blobs.glob("*.incomplete")} == {"b.0123abcd.incomplete", "c.incomplete"}


def test_a_token_is_sent_and_never_printed(tmp_path: Path, hub: Hub) -> None:
    hub.token = "hf_very_secret"
    refused = fetch(tmp_path, hub)
    assert refused.code == 1
    assert "HF_TOKEN" in refused.lines[-1]
    done = fetch(tmp_path, hub, HF_TOKEN="hf_very_secret")
    assert done.code == 0, done.text
    assert "hf_very_secret" not in done.text


def test_an_interpreter_without_the_library_is_an_error_with_its_fix(tmp_path: Path) -> None:
    bare = subprocess.run(
        [sys.executable, "-S", *command(tmp_path)[1:]], cwd=Path(__file__).parents[1], stdout=-1, text=True, check=False
    )
    assert bare.returncode == 1
    assert "cannot import huggingface_hub" in bare.stdout
    assert "engine.python" in bare.stdout
