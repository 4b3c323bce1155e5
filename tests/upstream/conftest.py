"""Which tests run before a change lands, where, and the processes that they share."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.upstream.run import INSTALLED_LMCACHE, LANDING, preloaders

_VERSION = re.compile(r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`full`: what is about a version that is neither the oldest nor the newest supported one, nor installed. With
    `--dist loadgroup` a worker has all tests of a version: one import of it is enough."""
    for item in items:
        versions = set(_VERSION.findall(item.nodeid.partition("::")[2]))
        if not item.path.is_relative_to(Path(__file__).parent):
            continue
        if versions - {*LANDING, INSTALLED_LMCACHE}:
            item.add_marker("full")
        for version in versions:
            item.add_marker(pytest.mark.xdist_group(version))


@pytest.fixture(scope="session", autouse=True)
def _preloaders(request: pytest.FixtureRequest) -> Generator[None]:
    """Before the first test, so that no test is blamed for a process that all of them share."""
    if not any(item.get_closest_marker("upstream") for item in request.session.items):
        yield  # the few tests here that need no sources
        return
    shared = preloaders()
    yield
    shared.close()
