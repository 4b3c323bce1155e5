"""What became of every behaviour of the pull requests that the patches grew from: ours, upstream's, or neither.

Pure data for the documentation and its tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdserve.patches.patch import Behaviour


@dataclass(frozen=True)
class Finding:
    """One item of a behaviour."""

    behaviour: Behaviour
    what: str
    verdict: Literal["ours", "upstream", "not applicable"]
    where: str
    """The patch, the rule or the upstream change."""
    test: str
    """File of the test that shows it."""
    since: str = ""
    """verdict upstream: the first release that has it."""


BEHAVIOURS: tuple[Finding, ...] = ()
"""In the order of the alphabet."""
