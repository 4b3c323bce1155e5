"""Which tests share a worker of pytest-xdist."""

from __future__ import annotations

import pytest

from tests.upstream.workers import group

pytestmark = pytest.mark.process
MODULE = "tests/upstream/test_some.py"
GROUPS = {
    "test_it[0.26.0]": "0.26.0",
    "test_it[head that needs more-0.27.1]": "0.27.1",
    "test_it[vllm0.30.0-lmcache0.5.6]": "0.30.0",
    "test_it[0.5.6]": MODULE,
    "test_it[0.26.01]": MODULE,
    "test_since_0_23": MODULE,
}


def test_tests_of_one_version_of_vllm_are_together_and_others_with_their_module() -> None:
    assert {name: group(f"{MODULE}::{name}") for name in GROUPS} == GROUPS
