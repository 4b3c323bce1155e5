"""Writes pdserve/patches/fingerprints.json from the sources of the supported versions.

`python -m tests.upstream.fingerprints` after reading what is new: a fingerprint in the table says that a person (or a
test on that version) has looked at the code: git's diff of it is what a release has changed under the patches.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from pdserve.patches.fingerprint import Fingerprint, of_loaded, of_tree
from pdserve.patches.patch import PatchTarget, may_be
from pdserve.patches.registry import REGISTRY
from tests.upstream.run import ALL_VLLM_VERSIONS, INSTALLED_LMCACHE
from tests.upstream.sources import source_tree

TABLE = Path(__file__).parents[2] / "pdserve" / "patches" / "fingerprints.json"
RELEASES: dict[str, tuple[str, ...]] = {"vllm": ALL_VLLM_VERSIONS, "lmcache": (INSTALLED_LMCACHE,)}

Table = dict[str, list[dict[str, object]]]


def generate() -> Table:
    """The table, from the sources of the releases; what is neither vllm's nor lmcache's comes from the installed
    package."""
    by_name = {target.name: target for patch in REGISTRY for target in patch.targets}
    return {name: _entries(by_name[name]) for name in sorted(by_name)}


def _entries(target: PatchTarget) -> list[dict[str, object]]:
    if target.distribution not in RELEASES:
        version = importlib.metadata.version(target.distribution).partition("+")[0]
        by_version = {version: of_loaded(target.name)}
    else:
        by_version = {
            version: of_tree(target.name, source_tree(target.distribution, version))
            for version in RELEASES[target.distribution]
            if may_be(version, target.only)
        }
    by_code: dict[Fingerprint, list[str]] = {}
    for version, fingerprint in by_version.items():
        if fingerprint is not None:
            by_code.setdefault(fingerprint, []).append(version)
    return [
        {"signature": fingerprint.signature, "code": fingerprint.code, "versions": versions}
        for fingerprint, versions in by_code.items()
    ]


def main() -> None:
    TABLE.write_text(json.dumps(generate(), indent=1) + "\n")


if __name__ == "__main__":
    main()
