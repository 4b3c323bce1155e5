"""For pytest-xdist (`-p tests.upstream.workers -n 2`): the tests of one version of vLLM run in one worker.

So each version is imported once. By the names of the tests, because xdist 3.8's own way (`--dist loadgroup`) writes to
an attribute that pytest 9.2 no longer reads.
"""

from __future__ import annotations

import re

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.upstream.run import ALL_VLLM_VERSIONS

_VERSION = re.compile(r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])")


class ByVersion(LoadScopeScheduling):  # type: ignore[misc]  # untyped
    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    """vLLM's version where the test's name has one; else its module."""
    module = nodeid.partition("::")[0]
    return next((version for version in versions(nodeid) if version in ALL_VLLM_VERSIONS), module)


def versions(nodeid: str) -> list[str]:
    """All that a test's name has."""
    return _VERSION.findall(nodeid.partition("::")[2])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByVersion:
    return ByVersion(config, log)
