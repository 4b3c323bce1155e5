"""The deployment that most tests of the proxy talk to, and which of them need not be run on both builds."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from tests.proxy.deployment import Deployment
from tests.proxy.raw import RawDeployment, lent, raw_deployment

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
        names = {*item.fixturenames, *inspect.unwrap(item.function).__code__.co_names}
        both = item.path.name in ON_BOTH_BUILDS and "PDSERVE_TEST_COMPILED" not in os.environ
        if (PROXIES | BY_HAND) & names and not both:
            item.add_marker("wheel")


@pytest.fixture(autouse=True)
def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The loop that the proxy has."""
    return uvloop.new_event_loop


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Not started: each test says with `up` what it needs."""
    with Deployment(tmp_path) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def module_raw(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    """A module's own settings are its RAW."""
    usual = {"limits": {"max_header_bytes": 16_384}, "max_body_bytes": 2 << 20}
    with raw_deployment(tmp_path_factory.mktemp("raw"), **getattr(request.module, "RAW", usual)) as raw:
        yield raw


@pytest.fixture
def raw(module_raw: RawDeployment) -> Iterator[RawDeployment]:
    """One for this module. Its limits of time are the usual ones, so that a slow machine is no client that means
    harm."""
    yield from lent(module_raw)
