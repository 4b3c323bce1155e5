"""What a flood of rejected requests must not do to others: push out what is remembered of them, take all sockets."""

from __future__ import annotations

import errno
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from prometheus_client import CollectorRegistry, generate_latest

from pdserve.patches.mooncake import sends, sockets
from pdserve.patches.record import EffectsCollector
from pdserve.patches.registry import REGISTRY
from pdserve.pd.workers import health_checks


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time is what it has."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def limit() -> Iterator[int]:
    """The hard limit of descriptors, with a soft one far below it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_800_rejected_requests_a_second_displace_no_id_for_five_minutes(now: list[float]) -> None:
    remembered = sends._Remembered()
    remembered.add("innocent")
    for second in range(300):
        now[0] += 1
        for number in range(800):
            remembered.add(f"{second}-{number}")
    assert "innocent" in remembered


def test_what_is_remembered_is_bounded_by_time_and_number(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = sends._Remembered()
    remembered.add("old")
    now[0] += sends._REMEMBERED_SECONDS + 1
    remembered.add("new")
    assert ("old" in remembered, "new" in remembered) == (False, True)
    monkeypatch.setattr(sends, "_REMEMBERED", 2)
    remembered.add("newer")
    remembered.add("newest")
    assert [name in remembered for name in ("new", "newer", "newest")] == [False, True, True]


def test_a_context_gets_more_sockets_than_libzmq_gives_by_default(limit: int) -> None:
    with zmq.Context() as context:
        sockets.widen(context)
        socks = [context.socket(zmq.PAIR) for _ in range(2000)]
        assert sockets.pulls_at_once(context) > 1023, "as many as without the patches, or more"
        for sock in socks:
            sock.close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(limit, sockets._DESCRIPTORS)


def test_pulls_leave_descriptors_to_the_rest_of_the_process(limit: int) -> None:
    with zmq.Context() as context:
        assert 1 <= sockets.pulls_at_once(context) * sockets._DESCRIPTORS_A_PULL <= 512 * 3 // 4


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (zmq.ZMQError(errno.EMFILE), True),
        (OSError(errno.ENFILE, "too many"), True),
        (zmq.ZMQError(errno.EAGAIN), False),
        (ValueError("no number"), False),
    ],
)
def test_a_lack_of_sockets_is_distinguished_from_other_errors(error: Exception, exhausted: bool) -> None:
    assert sockets.is_exhaustion(error) is exhausted


def test_the_proxy_finds_the_lack_of_sockets_on_the_page_of_an_engine(tmp_path: Path) -> None:
    effects = {"mooncake-pulls": {"out-of-sockets": 3, "peers-lost": 9}, "mooncake-sends": {"out-of-sockets": 1}}
    record = {"pid": 1, "session": os.getsid(0), "process": "worker", "kind": "worker", "active": []}
    (tmp_path / "1.json").write_text(json.dumps(record | {"effects": effects}))
    registry = CollectorRegistry()
    registry.register(EffectsCollector(tmp_path, os.getsid(0)))
    assert [float(times) for times in health_checks._NO_SOCKETS.findall(generate_latest(registry))] == [3, 1]
    assert sum(sockets.OUT_OF_SOCKETS in patch.effects for patch in REGISTRY) == 2
