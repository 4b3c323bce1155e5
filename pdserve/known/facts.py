"""Everything that is known of a version as one list: defects, what our patches correct, flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pdserve.installed.versions import Versions
from pdserve.known.defects import DEFECTS, affected
from pdserve.known.flags import FLAGS
from pdserve.patches.registry import REGISTRY

Kind = Literal["defect, refused", "defect, warned of", "defect, patched", "flag, refused", "flag, warned of"]


@dataclass(frozen=True)
class Fact:
    """One of them."""

    kind: Kind
    versions: Mapping[str, str]
    """Package -> range (PEP 440); all must hold. Empty: every version that was read."""
    needs: tuple[str, ...]
    """What must be in use for it to matter."""
    what: str
    source: str
    todo: str

    def holds(self, versions: Versions) -> bool:
        """Whether these versions are known to have it."""
        return all(affected(package, text, versions) for package, text in self.versions.items())


def facts() -> Iterator[Fact]:
    """All of them: what is refused first."""
    for defect in sorted(DEFECTS, key=lambda each: not each.refuse):
        yield Fact(
            "defect, refused" if defect.refuse else "defect, warned of",
            defect.versions,
            tuple(sorted(defect.needs)),
            defect.what,
            defect.source,
            defect.todo,
        )
    for patch in REGISTRY:
        ranges = {"vllm": patch.vllm, "lmcache": patch.lmcache}
        yield Fact(
            "defect, patched",
            {package: text for package, text in ranges.items() if text},
            tuple(sorted({*patch.connectors, *patch.settings})),
            patch.summary,
            patch.issue,
            f"nothing: the patch {patch.name} does it",
        )
    for flag in FLAGS:
        yield Fact(
            "flag, warned of" if flag.ignored else "flag, refused",
            {flag.package: flag.versions},
            (flag.name,),
            flag.what,
            "the argument parsers of the releases",
            flag.todo,
        )
