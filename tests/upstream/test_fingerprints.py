"""The table of what is known of upstream's code, beside the sources of the releases."""

from __future__ import annotations

import json

import pytest

from pdserve.patches.fingerprint import of_tree
from pdserve.patches.patch import may_be
from pdserve.patches.registry import REGISTRY
from pdserve.patches.verdict import judge
from tests.upstream.fingerprints import TABLE, generate
from tests.upstream.run import ALL_VLLM_VERSIONS
from tests.upstream.sources import source_tree

pytestmark = pytest.mark.upstream


@pytest.mark.full
def test_the_shipped_table_is_that_of_the_sources() -> None:
    assert json.loads(TABLE.read_text()) == generate(), "run python -m tests.upstream.fingerprints"


@pytest.mark.parametrize("version", ALL_VLLM_VERSIONS)
def test_every_patch_applies_to_exactly_the_versions_that_need_it(version: str) -> None:
    tree = source_tree("vllm", version)
    for patch in REGISTRY:
        if {target.distribution for target in patch.targets} != {"vllm"}:
            continue
        verdict = judge(patch, {"vllm": version}, look=lambda name: of_tree(name, tree))
        assert (verdict.outcome == "apply") == may_be(version, patch.vllm), f"{patch.name}: {verdict}"
