"""Patch lmcache-identity: each start of an LMCache server has a name, so that clients notice a new server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.wrap import wrap

NAME = "lmcache-identity"
_PREFIX = "pdserve-server-"
_MODULE = "lmcache.v1.multiprocess.modules.management"


def apply() -> None:
    """Wraps ManagementModule.get_experimental: its list of capabilities is the one answer that any client may ask for
    and that may grow; a client looks for those that it knows in it."""
    from lmcache.v1.multiprocess.modules.management import ManagementModule

    this_life = f"{_PREFIX}{uuid.uuid4().hex}"

    def around(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def get_experimental(self: Any) -> list[str]:
            return [*original(self), this_life]

        return get_experimental

    wrap(ManagementModule, "get_experimental", patch=NAME, around=around)


def identity_in(capabilities: Iterable[str]) -> str | None:
    """The name of the server's start; None: the server has no such name."""
    return next((name for name in capabilities if name.startswith(_PREFIX)), None)


PATCH = Patch(
    name=NAME,
    behaviour="LMCache server",
    summary=(
        "A new LMCache server answers the pings of its predecessor's clients as if nothing had happened, and drops "
        "all that they store. With the patch its capabilities have a name that is new at each start. "
        "lmcache-registration reads it."
    ),
    issue="not reported yet: docs/upstream-issues.md, the last one",
    targets=(PatchTarget(f"{_MODULE}.ManagementModule.get_experimental", body=True),),
    runs_in=("lmcache-server",),
    required=False,
    remove_when="a server answers the ping of an unregistered worker with an error",
    apply=apply,
)
