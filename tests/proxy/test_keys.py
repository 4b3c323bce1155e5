"""API keys: a file of hashes, a lookup that tells nothing, a reload that never leaves the door open, and the limits of
a key: what is counted, for how long, and when to come back.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.cli.operate import new_key
from pdserve.errors import RecipeError
from pdserve.pd import file_reads
from pdserve.pd.errors import ApiError
from pdserve.pd.file_reads import FileReads, read_regular
from pdserve.pd.limits import keys
from pdserve.pd.limits.api_keys import ApiKey
from pdserve.pd.limits.cells import OwnCells
from pdserve.pd.limits.quotas import _RATE_CELLS, WINDOW_SECONDS, Quotas, _Rate, cells_needed
from pdserve.pd.processes import shared_numbers
from tests.proxy.deployment import Deployment, keys_file
from tests.tables import each_row


def line(name: str, key: str, **more: Any) -> str:
    return json.dumps({"name": name, "sha256": sha256(key.encode()).hexdigest(), **more})


def file_of(folder: Path, *lines: str) -> Path:
    path = folder / "keys.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_key_is_known_by_its_hash_with_what_it_may_do(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        "# ours",
        "",
        line("a", "key-a", max_requests=2, requests_per_minute=3, priority=-5),
        line("b", "key-b"),
    )
    known = keys.KeyFile(path).current
    first = known.identify(b"Bearer key-a")
    assert (first.name, first.max_requests, first.requests_per_minute) == ("a", 2, 3)
    assert (first.priority, first.limited) == (-5, True)
    assert (known.identify(b"bearer  key-b").name, known.identify(b"Bearer key-b").limited) == ("b", False)
    assert known.identify(None, b"key-b").name == "b"


@each_row(
    "authorization, x_api_key",
    [
        (None, None),
        (b"", None),
        (b"Bearer", None),
        (b"Bearer ", None),
        (b"Bearer key-", None),
        (b"Bearer key-aa", None),
        (b"Basic key-a", None),
        (b"key-a", None),
        (b"Bearer wrong", b"key-a"),
        (None, b""),
        (b"Bearer \xff\x00", None),
        (b"Bearer " + sha256(b"key-a").hexdigest().encode(), None),
    ],
)
def test_everybody_else_gets_401_in_openais_shape(
    tmp_path: Path, authorization: bytes | None, x_api_key: bytes | None
) -> None:
    known = keys.KeyFile(file_of(tmp_path, line("a", "key-a"))).current
    with pytest.raises(ApiError) as refused:
        known.identify(authorization, x_api_key)
    assert refused.value.status == 401
    assert "key-a" not in str(refused.value)
    assert refused.value.body()["error"]["code"] == 401


def test_every_lookup_compares_once_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = keys.KeyFile(file_of(tmp_path, *(line(f"k{i}", f"key-{i}") for i in range(50)))).current
    compare = Mock(wraps=hmac.compare_digest)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for presented in (b"key-0", b"key-49", b"key-0", b"nobody's", b"", b"key-0x"):
        known.find(presented)
    assert [[len(side) for side in call.args] for call in compare.call_args_list] == [[32, 32]] * 6


@each_row(
    "text, number, what",
    [
        ("{", 1, "not an API key"),
        ("[]", 1, "not an API key"),
        ('{"name": "a"}', 1, "missing required field `sha256`"),
        ('{"name": "a", "sha256": "00"}', 1, "sha256"),
        ("\n# x\n" + line("a b", "k"), 3, "name"),
        (line("a", "k", max_request=1), 1, "max_request"),
        (line("a", "k", max_requests=0), 1, "max_requests"),
        (line("a", "k", max_requests="5"), 1, "max_requests"),
        (line("a", "k") + "\n" + line("a", "l"), 2, "two keys of the name a"),
        (line("a", "k") + "\n" + line("b", "k"), 2, "b has the same hash"),
        ("# nothing", None, "no API key in the file"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_line(
    tmp_path: Path, text: str, number: int | None, what: str
) -> None:
    path = file_of(tmp_path, text)
    with pytest.raises(RecipeError) as refused:
        keys.KeyFile(path)
    assert what in refused.value.render()
    assert refused.value.where == (f"{path}:{number}" if number else str(path))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        keys.KeyFile(tmp_path / "keys.jsonl")
    (tmp_path / "keys.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="not UTF-8"):
        keys.KeyFile(tmp_path / "keys.jsonl")


def test_a_changed_file_counts_and_a_broken_one_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = file_of(tmp_path, line("a", "key-a"))
    file = keys.KeyFile(path)
    unchanged = file.current
    file.reload_if_changed()
    assert file.current is unchanged

    path.write_text(line("b", "key-b") + "\n" + line("c", "key-c"))
    file.reload_if_changed()
    assert file.current.names == ("b", "c")
    assert file.current.find(b"key-a") is None

    path.write_text(line("b", "key-b") + "\n{")
    file.reload_if_changed()
    assert (file.current.names, file.failed) == (("b", "c"), 1)
    assert f"{path}:2" in caplog.text
    file.reload_if_changed()
    assert file.failed == 1, "one complaint for one version"

    path.unlink()
    file.reload_if_changed()
    assert (file.current.names, file.failed) == (("b", "c"), 2)


def test_a_file_replaced_within_a_tick_is_seen(tmp_path: Path) -> None:
    path = file_of(tmp_path, line("a", "key-a"))
    file = keys.KeyFile(path)
    before = path.stat()
    fresh = tmp_path / "fresh"
    fresh.write_text(line("b", "key-b") + "\n")
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    fresh.replace(path)
    file.reload_if_changed()
    assert file.current.names == ("b",)


def test_new_key_prints_a_key_that_the_file_then_knows(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    first = CliRunner().invoke(app, ["new-key", "team-a", "--file", str(path), "--max-requests", "4"])
    second = CliRunner().invoke(app, ["new-key", "team-b", "--file", str(path), "--priority", "3"])
    assert (first.exit_code, second.exit_code) == (0, 0)
    known = keys.KeyFile(path).current
    client = known.identify(b"Bearer " + first.stdout.strip().encode())
    assert (client.name, client.max_requests) == ("team-a", 4)
    assert known.identify(b"Bearer " + second.stdout.strip().encode()).priority == 3
    assert first.stdout.strip() not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_new_key_without_a_file_prints_the_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["new-key", "team-a"])
    path = file_of(tmp_path, result.stderr.strip())
    assert keys.KeyFile(path).current.identify(b"Bearer " + result.stdout.strip().encode()).name == "team-a"


@each_row("name, what", [("a b", "name"), ("known", "already"), ("", "name")])
def test_new_key_refuses_a_name_that_cannot_be(tmp_path: Path, name: str, what: str) -> None:
    path = file_of(tmp_path, line("known", "k"))
    before = path.read_text()
    result = CliRunner().invoke(app, ["new-key", name, "--file", str(path)])
    assert isinstance(result.exception, RecipeError)
    assert what in result.exception.render()
    assert path.read_text() == before


LIMITLESS: dict[str, Any] = {"max_requests": None, "requests_per_minute": None, "priority": 0}


def test_a_file_that_cannot_be_written_prints_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match="the key cannot be saved"):
        new_key("a", tmp_path / "nowhere" / "keys.jsonl", **LIMITLESS)
    assert capsys.readouterr().out == ""


# --- a key's best priority binds the proxy's queue and the engines' own


KEY, BEST = "a-client-key", 5


def test_neither_a_body_nor_a_header_can_ask_for_more(deployment: Deployment, tmp_path: Path) -> None:
    deployment.up(auth=keys_file(tmp_path, ("team", KEY), priority=BEST))
    deployment.proxy.http.headers["authorization"] = f"Bearer {KEY}"
    for asked in (-3, 5, 9, "high"):
        assert deployment.complete(priority=asked).status_code == 200
    for header in ("-3", "9", "high"):
        deployment.proxy.http.headers["x-vllm-priority"] = header
        assert deployment.complete().status_code == 200
    for fake in deployment.fakes:
        seen = fake.requests()
        assert [request["body"]["priority"] for request in seen[:4]] == [BEST, 5, 9, BEST]
        assert [request["headers"].get("x-vllm-priority") for request in seen[4:]] == [None, "9", None]


def test_a_request_that_an_engine_refuses_keeps_no_place_of_its_key(deployment: Deployment, tmp_path: Path) -> None:
    deployment.up(auth=keys_file(tmp_path, ("team", KEY), max_requests=1))
    deployment.proxy.http.headers["authorization"] = f"Bearer {KEY}"
    for _ in range(2):
        assert deployment.complete(stop=["a"] * 5).status_code == 400
    assert deployment.complete().status_code == 200


# --- files that the proxy reads again while it serves: none of them may hold up a request


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
def test_what_is_no_file_leaves_the_old_keys_in_force(deployment: Deployment, tmp_path: Path) -> None:
    deployment.up(auth=keys_file(tmp_path, ("team", KEY)))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").replace(tmp_path / "keys")
    deployment.proxy.until("the API keys stay as they were: .*not a regular file")
    deployment.proxy.process.send_signal(signal.SIGHUP)
    deployment.proxy.until("the API keys stay as they were: .*not a regular file")
    deployment.proxy.http.headers["authorization"] = f"Bearer {KEY}"
    assert deployment.complete().status_code == 200


# --- limits of a key


def quotas(clock: Callable[[], float] = lambda: 1000.0) -> Quotas:
    return Quotas(shared_numbers.private_numbers(cells_needed(1)), clock)


def key(name: str = "a", **limits: int) -> ApiKey:
    return ApiKey(name, bytes(32), **limits)


def refused(counts: Quotas, who: ApiKey) -> ApiError:
    with pytest.raises(ApiError) as caught:
        counts.enter(who)
    assert caught.value.status == 429
    return caught.value


def test_a_key_without_limits_is_not_counted() -> None:
    counts = quotas()
    for _ in range(100):
        counts.enter(key()).end()
    assert counts.in_flight("a") == 0


def test_requests_at_once() -> None:
    counts = quotas()
    first = counts.enter(key(max_requests=2))
    counts.enter(key(max_requests=2))
    error = refused(counts, key(max_requests=2))
    assert error.message == "The limit of this API key is 2 requests at once."
    assert error.headers() == {"retry-after": "1"}
    assert counts.in_flight("a") == 2
    counts.enter(key("b", max_requests=2))
    first.end()
    first.end()
    assert counts.in_flight("a") == 1
    counts.enter(key(max_requests=2))
    assert counts.rejected == {("a", "max_requests"): 1}


def test_requests_a_minute_and_exactly_when_the_next_one_may_come() -> None:
    now = 1000.25
    counts, who = quotas(lambda: now), key(requests_per_minute=2)
    counts.enter(who).end()
    now = 1010.75
    counts.enter(who).end()
    now = 1030.5
    assert refused(counts, who).retry_after == 31
    now = 1060.5
    refused(counts, who)
    now = 1061.5
    counts.enter(who)
    assert refused(counts, who).retry_after == 10


def test_counts_outlive_a_reload_that_changes_the_limits() -> None:
    counts = quotas()
    for _ in range(3):
        counts.enter(key(max_requests=10))
    refused(counts, key(max_requests=3))
    refused(counts, key(requests_per_minute=3))


def test_processes_share_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.touch()

    def process(index: int) -> Quotas:
        return Quotas(shared_numbers.shared_numbers(path, cells_needed(2), process=index, processes=2), lambda: 1000.0)

    first, second = process(0), process(1)
    who = key(max_requests=2, requests_per_minute=3)
    # Seen in another order by the other process: rows go by name.
    second.enter(key("other", max_requests=1))
    use = first.enter(who)
    second.enter(who)
    refused(first, who)
    refused(second, who)
    use.end()
    second.enter(who)
    assert refused(first, who).message == "The limit of this API key is 2 requests at once."
    assert (first.in_flight("a"), second.in_flight("a")) == (2, 2)
    successor = process(1)
    assert refused(successor, who).message == "The limit of this API key is 3 requests a minute."
    assert successor.in_flight("a") == 0


@given(st.lists(st.tuples(st.integers(0, 70) | st.sampled_from([59, 60, 61, 62]), st.integers(0, 20)), max_size=40))
def test_a_rate_is_a_naive_count(steps: list[tuple[int, int]]) -> None:
    """Counted, and when there is room again."""
    rate, second = _Rate(OwnCells(_RATE_CELLS), 0), 1000
    counted: list[int] = []

    def total(now: int) -> int:
        return sum(now - at <= WINDOW_SECONDS for at in counted)

    for pause, wanted in steps:
        second += pause
        assert rate.total(second) == total(second)
        rate.add_one(second)
        counted.append(second)
        assert rate.total(second) == total(second)
        assert rate.free_in(wanted, second) == next(wait for wait in range(1, 62) if total(second + wait) <= wanted)
