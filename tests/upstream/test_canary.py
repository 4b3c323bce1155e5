"""The canary that looks at a newer upstream, and the table that it compares with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.patches.fingerprint import _parse_file, of_tree
from pdserve.patches.patch import may_be
from pdserve.patches.registry import REGISTRY
from pdserve.patches.verdict import judge
from tests.upstream.canary import changes
from tests.upstream.fingerprints import RELEASES, TABLE, generate
from tests.upstream.run import LANDING
from tests.upstream.sources import source_tree

pytestmark = pytest.mark.upstream
OBSERVE = "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py"


@pytest.mark.parametrize(("distribution", "version"), [(name, each) for name in RELEASES for each in RELEASES[name]])
def test_the_shipped_table_is_that_of_the_sources(distribution: str, version: str) -> None:
    shipped = {
        target: [
            {**entry, "versions": [version]}
            for entry in entries
            if not target.startswith(f"{distribution}.") or version in entry["versions"]
        ]
        for target, entries in json.loads(TABLE.read_text()).items()
    }
    made = {
        target: [{**entry, "versions": [version]} for entry in entries]
        for target, entries in generate({distribution: (version,)}).items()
    }
    assert made.items() <= shipped.items(), "run python -m tests.upstream.fingerprints"


def test_the_shipped_table_has_every_target_and_no_other_release() -> None:
    shipped = json.loads(TABLE.read_text())
    assert shipped.keys() == {target.name for patch in REGISTRY for target in patch.targets}
    for name, entries in shipped.items():
        known = RELEASES.get(name.partition(".")[0])
        assert known is None or {version for entry in entries for version in entry["versions"]} <= set(known), name


@pytest.mark.parametrize("version", RELEASES["vllm"])
def test_every_patch_applies_to_exactly_the_versions_that_need_it(version: str) -> None:
    tree = source_tree("vllm", version)
    for patch in REGISTRY:
        if {target.distribution for target in patch.targets} != {"vllm"}:
            continue
        verdict = judge(patch, {"vllm": version}, look=lambda name: of_tree(name, tree))
        assert (verdict.outcome == "apply") == may_be(version, patch.vllm), f"{patch.name}: {verdict}"


def test_of_a_known_version_only_what_it_has_corrected_is_reported() -> None:
    lines = list(changes("vllm", source_tree("vllm", LANDING[-1]), LANDING[-1]))
    assert lines
    assert all("upstream has corrected this code" in line for line in lines)


def test_a_changed_body_a_new_signature_and_a_lost_target_are_reported(tmp_path: Path) -> None:
    original = (source_tree("vllm", LANDING[0]) / OBSERVE).read_text()
    for now, expected in (
        (original.replace("assert connector_id in", "assert not connector_id in"), "has a new body"),
        (original.replace("def observe(self, transfer_stats_data", "def observe(self, stats, data"), "a new signature"),
        (original.replace("def observe(", "def observed("), "is gone"),
    ):
        assert now != original
        target = tmp_path / OBSERVE
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(now)
        _parse_file.cache_clear()
        lines = [line for line in changes("vllm", tmp_path, None) if line.startswith("multiconnector-prom-metrics")]
        assert any(expected in line for line in lines), lines
