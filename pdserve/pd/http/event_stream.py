"""Server-sent events as bytes: where events end, and what the first one says."""

from __future__ import annotations

CONTENT_TYPE = "text/event-stream"
END = b"\n\n"


def whole_events(data: bytes) -> int:
    """Length of the part of `data` that consists of complete events; 0 when there is none."""
    if data.endswith(END):
        return len(data)
    end = data.rfind(END)
    other = data.rfind(b"\r\n\r\n")
    return max(end + 2 if end >= 0 else 0, other + 4 if other >= 0 else 0)


def first_event(data: bytes) -> bytes | None:
    """The data of the first complete event; comments (keep-alives) are no events."""
    *events, _ = data.replace(b"\r\n", b"\n").split(END)
    for event in events:
        lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            return b"\n".join(lines)
    return None
