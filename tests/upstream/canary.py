"""Which fingerprints a newer upstream has changed: `python -m tests.upstream.canary [vllm|lmcache] [VERSION|FOLDER]`.

Run by hand or weekly. Without a version the newest release on the index is looked at, without a name both are. It
imports nothing and changes nothing. Exit code 1: something that a patch takes hold of has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pdserve.patches.fingerprint import known_fingerprints, of_tree
from pdserve.patches.patch import Patch, PatchTarget, may_be
from pdserve.patches.registry import REGISTRY
from pdserve.patches.verdict import judge
from tests.upstream.sources import releases, source_tree


def changes(distribution: str, root: Path, version: str | None) -> Iterator[str]:
    """One line for each target of a patch that this code has changed, moved or corrected."""
    for patch in REGISTRY:
        of_it = [target for target in patch.targets if target.distribution == distribution]
        for target in of_it:
            if may_be(version, target.only):
                yield from _changed(patch, target, root)
        if of_it:
            verdict = judge(patch, {distribution: version}, look=lambda name: of_tree(name, root))
            if verdict.outcome == "not-needed":
                yield f"{patch.name}: {verdict.why}; it can go once this is the oldest supported version"


def _changed(patch: Patch, target: PatchTarget, root: Path) -> Iterator[str]:
    known = known_fingerprints().get(target.name, ())
    fingerprint = of_tree(target.name, root)
    if fingerprint is None:
        yield f"{patch.name}: {target.name} is gone"
    elif fingerprint.signature not in {entry.signature for entry in known}:
        yield f"{patch.name}: {target.name} has a new signature {fingerprint.signature}"
    elif target.body and fingerprint.code not in {entry.code for entry in known}:
        yield f"{patch.name}: {target.name} has a new body [{fingerprint.code}]"


def main(arguments: list[str]) -> int:
    wanted = arguments[:1] or ["vllm", "lmcache"]
    seen = 0
    for distribution in wanted:
        which = arguments[1] if len(arguments) > 1 else str(releases(distribution)[-1])
        folder = Path(which)
        root = folder if folder.is_dir() else source_tree(distribution, which, pinned=False)
        lines = list(changes(distribution, root, None if folder.is_dir() else which))
        print(f"{distribution} {which}: {len(lines)} change(s) that concern a patch")
        print("".join(f"  {line}\n" for line in lines), end="")
        seen += len(lines)
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
