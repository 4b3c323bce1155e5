"""The deployment that most tests of the proxy talk to, and which of them need not be run on both builds."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.system import procfs
from tests.proxy.deployment import Child, Deployment
from tests.proxy.nursery import Nursery
from tests.proxy.raw import RawDeployment, raw_deployment

PROXIES = {"deployment", "engines", "impatient", "pair", "proxy", "raw", "shared", "slow", "split", "strict", "tight"}
"""Fixtures with a proxy in a process of its own."""
BY_HAND = {"raw_deployment", "Proxy"}
"""Names by which a test starts one itself."""
ON_BOTH_BUILDS = {"test_contract.py"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks those that start a proxy: scripts/test runs them on the build that users install, and all others on the
    source. What passes there passes on the source too, which lets more through; that it starts and serves there as well
    is shown by ON_BOTH_BUILDS."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent != here or not isinstance(item, pytest.Function):
            continue
        names = item.fixturenames
        if PROXIES & set(names) or BY_HAND & set(inspect.unwrap(item.function).__code__.co_names):
            if "nursery" not in names:  # which parameters of one test share
                # Made before what has function scope, so that it is there for longer.
                first = names.index("_nothing_is_left")
                names[first:first] = ["nursery", "_forks_have_ended"]
            if item.path.name not in ON_BOTH_BUILDS or "PDSERVE_TEST_COMPILED" in os.environ:
                item.add_marker("wheel")


@pytest.fixture(scope="session")
def nursery(_own_shared_memory: None, _own_cgroup: None, _own_network: None, _see_orphans: None) -> Iterator[Nursery]:
    Child.nursery = Nursery()
    yield Child.nursery
    Child.nursery.close()
    Child.nursery = None


@pytest.fixture
def _forks_have_ended(nursery: Nursery) -> Iterator[None]:
    """To tests/conftest.py they belong to the nursery."""
    before = procfs.descendants(nursery.pid)
    yield
    left = procfs.descendants(nursery.pid) - before
    assert not left, "processes outlive the test: " + ", ".join(f"{pid} ({procfs.command(pid)})" for pid in left)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Not started: each test says with `up` what it needs."""
    with Deployment(tmp_path) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def module_raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    limits = {"max_header_bytes": 16_384}
    with raw_deployment(tmp_path_factory.mktemp("raw"), limits=limits, max_body_bytes=2 << 20) as raw:
        yield raw


@pytest.fixture
def raw(module_raw: RawDeployment) -> Iterator[RawDeployment]:
    """One for this module: whatever a test has done to it, it must serve on. Its limits of time are the usual ones, so
    that a slow machine is no client that means harm."""
    module_raw.engine.seen.clear()
    yield module_raw
    module_raw.unharmed()
