"""The canary that looks at a newer upstream, and the table that it compares with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.patches.fingerprint import _parsed, of_tree
from pdserve.patches.patch import may_be
from pdserve.patches.registry import REGISTRY
from pdserve.patches.verdict import judge
from tests.upstream.canary import changes
from tests.upstream.fingerprints import TABLE, generate
from tests.upstream.run import ALL_VLLM_VERSIONS
from tests.upstream.sources import source_tree

pytestmark = pytest.mark.upstream
OBSERVE = "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py"


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


def test_of_a_known_version_only_what_it_has_corrected_is_reported() -> None:
    lines = list(changes("vllm", source_tree("vllm", "0.30.0"), "0.30.0"))
    assert lines
    assert all("upstream has corrected this code" in line for line in lines)


def test_a_changed_body_a_new_signature_and_a_lost_target_are_reported(tmp_path: Path) -> None:
    original = (source_tree("vllm", "0.30.0") / OBSERVE).read_text()
    for changed, expected in (
        (original.replace("assert connector_id in", "assert not connector_id in"), "has a new body"),
        (
            original.replace("def observe(self, transfer_stats_data", "def observe(self, stats, data"),
            "has a new signature",
        ),
        (original.replace("def observe(", "def observed("), "is gone"),
    ):
        assert changed != original
        target = tmp_path / OBSERVE
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(changed)
        _parsed.cache_clear()
        lines = [line for line in changes("vllm", tmp_path, None) if line.startswith("multiconnector-prom-metrics")]
        assert any(expected in line for line in lines), lines
