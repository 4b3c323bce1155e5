"""A node prefix that no other running cluster of this machine has: equal names would share a freezer cgroup."""

from __future__ import annotations

import socket
import string

from tests.cluster.errors import LabError


def claim_prefix() -> tuple[str, socket.socket]:
    """`pdn` where it is free. The claim holds as long as a process has the socket open, and needs no file."""
    for letter in "n" + string.ascii_lowercase.replace("n", ""):
        prefix = f"pd{letter}"
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0pdserve-cluster-{prefix}")
        except OSError:
            claim.close()
        else:
            return prefix, claim
    raise LabError("26 clusters run on this machine")
