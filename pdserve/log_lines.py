"""What the log lines of vLLM, LMCache and uvicorn have in common."""

from __future__ import annotations

import re

_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^\((?P<who>[\w.-]+(?: [\w.-]+)*) pid=\d+\) ")
_HARMLESS = re.compile(
    r"^(?:\([^)]*pid=\d+\) )?(?:INFO|WARNING|DEBUG)\b"  # vLLM, uvicorn
    r"|\bLMCache (?:INFO|WARNING|DEBUG):"
    r"|^\S+\.py:\d+: \w*Warning: "  # the warnings module
    r"|^[IW]\d{4} \d\d:\d\d"  # Mooncake (glog): it says W for "no RDMA devices" and goes on over TCP
)


def plain(line: str) -> str:
    """Without colours, and what a progress bar wrote last of what it wrote over."""
    text = _COLOR.sub("", line).rstrip("\r\n")
    return text.rsplit("\r", 1)[-1]


def message(line: str) -> str:
    """`plain`, without vLLM's `(EngineCore pid=12) `."""
    return _PREFIX.sub("", plain(line))


def may_tell_a_cause(line: str) -> bool:
    """Whether a plain line can be about a failure: INFO and WARNING mention errors that did not happen."""
    return not _HARMLESS.search(line)
