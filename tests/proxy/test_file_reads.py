"""Files that the proxy reads again while it serves: none of them may hold up a request."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from pdserve.pd import file_reads
from pdserve.pd.file_reads import FileReads, read_regular
from tests.proxy.deployment import Deployment, keys_file

KEY = "a-client-key"


def test_only_a_regular_file_of_a_reasonable_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, pipe, folder = tmp_path / "file", tmp_path / "pipe", tmp_path
    file.write_bytes(b"content")
    os.mkfifo(pipe)
    assert read_regular(file) == b"content"
    for path in (pipe, folder, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(path)
    monkeypatch.setattr(file_reads, "_MOST_BYTES", 6)
    with pytest.raises(OSError, match="larger"):
        read_regular(file)


def test_a_read_that_hangs_is_left_and_the_next_one_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reads, "READ_SECONDS", 0.05)
    answers = threading.Event()

    async def test() -> None:
        reads = FileReads()
        with pytest.raises(TimeoutError):
            await reads.run(answers.wait)
        with pytest.raises(TimeoutError):
            await reads.run(lambda: "too early")
        answers.set()
        monkeypatch.setattr(file_reads, "READ_SECONDS", 60.0)
        assert await reads.run(lambda: "in time") == "in time"

    try:
        asyncio.run(test())
    finally:
        answers.set()


@pytest.mark.process
@pytest.mark.parametrize("instead", ["a pipe", "a device", "a folder"])
def test_whatever_stands_in_place_of_the_keys_the_old_ones_stay_in_force(
    deployment: Deployment, tmp_path: Path, instead: str
) -> None:
    keys, other = tmp_path / "keys", tmp_path / "other"
    deployment.up(auth=keys_file(tmp_path, ("team", KEY)))
    if instead == "a pipe":
        os.mkfifo(other)
    elif instead == "a device":
        other.symlink_to("/dev/zero")
    else:
        keys.unlink()
        other.mkdir()
    other.replace(keys)
    deployment.proxy.until("the API keys stay as they were: .*not a regular file")
    deployment.proxy.process.send_signal(signal.SIGHUP)
    deployment.proxy.until("the API keys stay as they were: .*not a regular file")
    deployment.proxy.http.headers["authorization"] = f"Bearer {KEY}"
    assert deployment.complete().status_code == 200
