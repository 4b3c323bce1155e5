"""Server-sent events as bytes: where events end, and the data of the first one."""

from __future__ import annotations

from typing import Final

CONTENT_TYPE: Final = "text/event-stream"
END: Final = b"\n\n"
LONGEST_END: Final = b"\r\n\r\n"
_WITHOUT_OUTPUT: Final = (b"response.created", b"response.in_progress")
"""Types of events that vLLM's Responses API sends before its engine has done anything."""


def whole_events(data: bytes) -> int:
    """Length of the part of `data` that consists of complete events; 0 when there is none."""
    if data.endswith(END):
        return len(data)
    end = data.rfind(END)
    other = data.rfind(LONGEST_END)
    return max(end + 2 if end >= 0 else 0, other + 4 if other >= 0 else 0)


def first_event(data: bytes) -> bytes | None:
    """The data of the first complete event that comes from the engine; comments (keep-alives) are no events."""
    *events, _ = data.replace(b"\r\n", b"\n").split(END)
    for event in events:
        lines = event.split(b"\n")
        payload = [line[5:].lstrip() for line in lines if line.startswith(b"data:")]
        names = [line[6:].strip() for line in lines if line.startswith(b"event:")]
        if payload and not (names and names[-1] in _WITHOUT_OUTPUT):
            return b"\n".join(payload)
    return None
